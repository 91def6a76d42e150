"""Makes the input of `prepare_data.sh` from any text: shards of sentences, evaluation text,
vocabulary, model sizes.

Writes to OUTPUTDIR/download: results4/part-XXXXX-of-XXXXX and results4/eval.txt (one sentence per
line, a blank line between documents; every n-th document is for evaluation and not in the shards),
vocab.txt (a WordPiece vocabulary trained on the shards, unless given) and bert_config.json of a
small BERT with that vocabulary. Duplicate documents are dropped.

Inputs are files, and folders with all text below them, pooled: plain text (UTF-8) and JSON Lines
(--text-field names the text), each also as gzip, bzip2, xz or zstd; formats are detected by content.
Files that are no text (hidden, README, licence, HTML, tables, binary, empty) are counted, and listed
with the reason in OUTPUTDIR/download/left_out.tsv; text that cannot be read stops the command, all files
at once.

Text in pages, such as pdftotext's, and subtitles (.srt, .vtt) are made prose, and what was done is
counted. Plain text may have one sentence per line and a blank line between documents, or be prose; the
layout is detected and printed, or set by --layout. Memory grows by about 65 bytes a document and
not with the text; the disk needs its size in addition until it is written. Run again, it resumes;
the result does not depend on --jobs. `--input pydoc` is the language reference that comes with
Python (PSF licence): real English prose without a download.
"""

import argparse
import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import BertWordPieceTokenizer

from bert.data.format import atomic_file
from bert.data.records import Array, DataError
from common.files import object_of
from input_preprocessing.stage.cli import human_bytes, say
from input_preprocessing.stage.manifest import (
    forget,
    is_recorded,
    md5_of,
    record,
    recorded_md5,
    write_text,
)
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.stage.reading import slices
from input_preprocessing.text import inputs, vocabulary
from input_preprocessing.text.parts import records_without_text, split, table_of
from input_preprocessing.text.sentences import LAYOUTS
from input_preprocessing.text.sources import WORTH_WORKERS, find
from input_preprocessing.text.tokenization import (
    MAX_CHARACTERS_PER_WORD,
    normalise,
    tokenize,
)

SHARD_BYTES = 250_000
MOST_SHARDS = 500
FEWEST_DOCUMENTS = 4
TEXT_OPTIONS = (
    "layout",
    "text_key",
    "vocab_size",
    "num_files",
    "eval_share",
    "layers",
    "hidden_size",
)
# Of the first shards, to train a vocabulary on: 0.6 GB of memory, if every tenth word is another.
VOCABULARY_BYTES = 100_000_000
# The trainer's time grows with the square of a word's length.
_UNKNOWN_WORD = re.compile(rf"[^\s!-/:-@\[-`{{-~]{{{MAX_CHARACTERS_PER_WORD + 1},}}")
NOTE = "corpus.json"  # in the download folder: recipe, and md5 of each file


def train_vocabulary(
    paths: list[Path], size: int, target: Path, lower_case: bool = True
) -> None:
    """Trains a WordPiece vocabulary of at most `size` tokens, uncased or cased.

    Which of two equally frequent pairs is merged first depends on the random order in which the
    trainer meets characters; passing all of them as special tokens makes the vocabulary
    reproducible.
    """

    def lines() -> Iterator[str]:
        for path in paths:
            with open(path, encoding="utf-8") as file:
                while block := file.readlines(1 << 20):
                    # By our tokenizer, so that the words counted are those that instances have.
                    text = normalise("".join(block), lower_case)
                    yield from _UNKNOWN_WORD.sub(" ", text).split("\n")

    characters: Counter[str] = Counter()
    for line in lines():
        characters.update(line.replace(" ", ""))
    # Each takes two entries, alone and after ##: at most a quarter of the vocabulary together.
    common = sorted(character for character, _ in characters.most_common(size // 8))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    named = [*special, *common, *(f"##{character}" for character in common)]
    tokenizer = BertWordPieceTokenizer(lowercase=lower_case, strip_accents=lower_case)
    tokenizer.train_from_iterator(
        lines(),
        vocab_size=size,
        min_frequency=2,
        limit_alphabet=len(common),
        special_tokens=named,
        show_progress=False,
    )
    words = tokenizer.get_vocab()
    write_text(
        target, "".join(f"{word}\n" for word in sorted(words, key=words.__getitem__))
    )


def bert_config(
    vocab_size: int, layers: int, hidden_size: int, max_seq_length: int
) -> dict[str, object]:
    """A bert_config.json with BERT's proportions: heads of 64, feed-forward four times as wide."""
    return {
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": max_seq_length,
        "num_attention_heads": hidden_size // 64,
        "num_hidden_layers": layers,
        "type_vocab_size": 2,
        "vocab_size": vocab_size,
    }


def _write(
    options: argparse.Namespace,
    parts: list[Path],
    kinds: list[str],
    download: Path,
    begun: bool,
) -> str:
    """Writes all files except those of an earlier run with the same recipe; returns a summary."""
    # Of each document: where it ends in its part, characters, hash of 8 bytes.
    tables = [np.load(table_of(part), mmap_mode="r") for part in parts]
    # Number of the first document of each part.
    starts = np.cumsum([0, *map(len, tables)])
    # Of equal documents the first, by a hash of 8 bytes, all that is held of each.
    hashes = np.concatenate([table[:, 2] for table in tables])
    kept = np.sort(np.unique(hashes, return_index=True)[1])
    _check_enough(options, kinds, len(kept))
    # Every n-th document is for evaluation, at least one.
    step = max(2, min(round(1 / options.eval_share), len(kept)))
    held_out = np.arange(len(kept)) % step == step // 2
    training, evaluation = kept[~held_out], kept[held_out]
    lengths = np.concatenate([table[:, 1] for table in tables])
    characters = int(lengths[training].sum())
    # Documents go round-robin to part files of at least two documents, since a random next sentence
    # comes from another document of the same file.
    wanted = options.num_files or min(MOST_SHARDS, characters // SHARD_BYTES + 1)
    count = min(wanted, len(training) // 2) or 1
    text = download / "results4"
    text.mkdir(parents=True, exist_ok=True)
    shards = [text / f"part-{i:05d}-of-{count:05d}" for i in range(count)]
    # What an interrupted run with this recipe finished is kept; files of any other are removed.
    for old in (*text.glob("part-*"), text / "eval.txt"):
        if not begun or old not in (*shards, text / "eval.txt"):
            old.unlink(missing_ok=True)
            forget([old])
    tasks = [(training[i::count], shard) for i, shard in enumerate(shards)]
    tasks.append((evaluation, text / "eval.txt"))
    weights = [float(lengths[numbers].sum()) for numbers, _ in tasks]
    deal, worth = partial(_deal, parts, starts), WORTH_WORKERS
    run_tasks(
        "corpus: shards", deal, tasks, jobs=options.jobs, weights=weights, worth=worth
    )
    words = _write_vocabulary(options, shards, download)
    size = human_bytes(sum(path.stat().st_size for path in shards))
    repeated = int(starts[-1]) - len(kept)
    dropped = f", {repeated} duplicates dropped" if repeated else ""
    fit = fit_of(words, text / "eval.txt", options)
    return (
        f"{len(training)} documents ({size}) in {count} files, {len(evaluation)} for evaluation"
        f"{dropped}, {len(words)} tokens in the vocabulary\n{fit}"
    )


def _check_enough(options: argparse.Namespace, kinds: list[str], count: int) -> None:
    """Raises DataError for too few documents: often a file whose layout was misread."""
    if count >= FEWEST_DOCUMENTS:
        return
    by_line = LAYOUTS["sentences"] in kinds
    gap = "a blank line" if by_line else "two blank lines"
    documents = f"{count} document{'s' * (count != 1)} (read as {', '.join(kinds)})"
    needed = f"at least {FEWEST_DOCUMENTS} different ones are needed"
    raise DataError(
        f"{' '.join(options.input)} has {documents}, {needed}; "
        f"put {gap} between documents, or give more text"
    )


def _write_vocabulary(
    options: argparse.Namespace, shards: list[Path], download: Path
) -> vocabulary.Vocabulary:
    """Writes vocab.txt, given or trained on the first shards, and bert_config.json."""
    path = download / "vocab.txt"
    if options.vocab_file:
        with atomic_file(path) as unfinished:
            shutil.copyfile(options.vocab_file, unfinished)
    else:
        sizes = np.cumsum([shard.stat().st_size for shard in shards])
        learnt = shards[: int(np.searchsorted(sizes, VOCABULARY_BYTES)) + 1]
        train_vocabulary(learnt, options.vocab_size, path, options.do_lower_case)
    words = vocabulary.load(path)
    shape = options.layers, options.hidden_size, options.max_seq_length
    config = bert_config(len(words), *shape)
    sizes_file = download / "bert_config.json"
    write_text(sizes_file, json.dumps(config, indent=2) + "\n")
    record(path)
    record(sizes_file)
    return words


def fit_of(
    words: vocabulary.Vocabulary, text: Path, options: argparse.Namespace
) -> str:
    """How well vocabulary and sequences fit the first million bytes of a text (BERT's on English:
    1.2 and 0.00%).
    """
    with open(text, "rb") as file:
        tokenized = tokenize(file.read(1_000_000), words, options.do_lower_case)
    tokens, lengths = tokenized.tokens, np.diff(tokenized.segment_offsets)
    continues = np.array([token.startswith("##") for token in words.tokens])
    begun = np.count_nonzero(~continues[tokens]) or 1
    unknown = np.count_nonzero(tokens == words.ids["[UNK]"]) / (len(tokens) or 1)
    fit = f"{len(tokens) / begun:.2f} tokens per word, {unknown:.2%} of the tokens unknown"
    if long := lengths[lengths > options.max_seq_length - 3].sum():
        fit += f"\n{long / len(tokens):.2%} of the tokens are in sentences that no sequence holds: their rest is lost"
    return f"vocabulary: {fit}"


def _deal(parts: list[Path], starts: Array, task: tuple[Array, Path]) -> None:
    """Writes a shard of the documents with these numbers, ascending over all parts."""
    chosen, target = task
    if is_recorded(target):
        return
    with atomic_file(target) as unfinished, open(unfinished, "wb") as output:
        for texts in slices(parts, _places(parts, starts, chosen)):
            output.writelines(texts)
    record(target)


def _places(parts: list[Path], starts: Array, chosen: Array) -> Array:
    """(part, begin, end) of each document, (N, 3)."""
    positions = np.empty((len(chosen), 3), dtype=np.int64)
    bounds = np.searchsorted(chosen, starts)
    for number, (low, high) in enumerate(pairwise(bounds.tolist())):
        if low < high:
            ends = np.load(table_of(parts[number]), mmap_mode="r")[:, 0]
            inside = chosen[low:high] - starts[number]
            positions[low:high, 0] = number
            # A document begins where the one before it in its part ends.
            positions[low:high, 1] = np.where(inside > 0, ends[inside - 1], 0)
            positions[low:high, 2] = ends[inside]
    return positions


def _files(download: Path, md5: Callable[[Path], str] = md5_of) -> dict[str, str]:
    """md5 of every file of the corpus: as it is, or by ``md5``."""
    names = ("results4/eval.txt", "vocab.txt", "bert_config.json")
    paths = [
        *(download / "results4").glob("part-*"),
        *(download / name for name in names),
    ]
    return {
        str(path.relative_to(download)): md5(path)
        for path in sorted(paths)
        if path.is_file()
    }


def make(options: argparse.Namespace, download: Path) -> None:
    """Makes text, vocabulary and model sizes for a preparation, unless they are up to date.

    Args:
        options: those of `text` and `case` in options.yaml, and input, vocab_file, jobs and
        max_seq_length. download: folder to write to.

    Raises:
        DataError: the input cannot be read or used.
    """
    if options.hidden_size % 64:
        raise DataError(
            f"--hidden-size {options.hidden_size} is not a multiple of 64 (the width of an attention head)"
        )
    vocab_md5 = vocabulary.load(options.vocab_file).md5 if options.vocab_file else ""
    work = download / "corpus"  # removed at the end
    texts, left_out = find(
        options.input, options.layout, options.text_key, work, options.jobs
    )
    if message := inputs.report(
        left_out, len(texts), download, " ".join(options.input)
    ):
        say(f"corpus: {message}")
    done = sum((source.done for source in texts), Counter[str]())
    if done:
        number = sum(bool(source.done) for source in texts)
        message = ", ".join(f"{count:,} {what}" for what, count in (+done).items())
        say(f"corpus: {number:,} files were laid out: {message}")
    md5 = hashlib.md5(" ".join(source.md5 for source in texts).encode()).hexdigest()
    names = (*TEXT_OPTIONS, "max_seq_length", "do_lower_case")
    named = {name: getattr(options, name) for name in names}
    recipe = {"text": md5, "vocab_file": vocab_md5, **named, "documents": "different"}
    # Corpora of versions that knew the ends of English sentences only are made again.
    recipe["sentences"] = "of any script"
    note = download / NOTE
    made = object_of(note)
    # Compared with the files as they are: one that was changed since makes the corpus again.
    if made == {"recipe": recipe, "files": _files(download)} and made["files"]:
        # A run that was killed at its very end may have left them.
        forget(download / name for name in made["files"])
        shutil.rmtree(work, ignore_errors=True)
        say(
            f"{' '.join(options.input)}: {download} is up to date with this text; nothing to do"
        )
        return
    if not note.exists() and any((download / "results4").glob("part-*")):
        raise DataError(
            f"{download}/results4 has text not made by this command; move it, or give another folder"
        )
    parts = split(texts, options.text_key, work, options.jobs)
    unfinished = {"recipe": recipe, "files": {}}
    # Before the first file: it claims the folder, and tells the next run whose files are in it.
    write_text(note, json.dumps(unfinished, indent=1) + "\n")
    kinds = list(dict.fromkeys(source.kind for source in texts))
    summary = _write(options, parts, kinds, download, begun=made == unfinished)
    empty = records_without_text(texts, parts)
    summary += inputs.report_records(empty, download)
    # As they were written: what was changed since makes the corpus again the next time.
    files = _files(download, recorded_md5)
    write_text(note, json.dumps({"recipe": recipe, "files": files}, indent=1) + "\n")
    forget(download / name for name in files)
    shutil.rmtree(work)
    say(f"{' '.join(options.input)}: read as {', '.join(kinds)}; {summary}")


def main(options: argparse.Namespace) -> None:
    make(options, options.outputdir / "download")
