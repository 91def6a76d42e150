"""Makes a corpus for `prepare_data.sh` of any text: shards of sentences, evaluation text, vocabulary, model size.

Writes to OUTPUTDIR/download: results4/part-XXXXX-of-XXXXX and results4/eval.txt (one sentence per line, a blank line
between documents; the evaluation text is every n-th document and not in the shards), vocab.txt (a WordPiece vocabulary
trained on the shards, unless one is given) and bert_config.json of a small BERT with that vocabulary.

Inputs are files, and folders with all text below them, read as one pool: plain text (UTF-8), JSON Lines and Parquet
(--text-key names the field), WikiExtractor's <doc> files; the contents tell which. Plain text may have one sentence per
line and a blank line between documents, or be prose; which of the two is detected and printed, --layout decides. All
documents are held in memory. `--input pydoc` is the language reference that comes with Python (PSF licence): real
English prose that needs no download.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tokenizers import BertWordPieceTokenizer

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.stage.cli import add_lower_case, human_bytes, positive
from input_preprocessing.stage.manifest import md5_of
from input_preprocessing.text import vocabulary
from input_preprocessing.text.sources import LAYOUTS, Document, read_pool
from input_preprocessing.text.tokenization import normalise

SHARD_BYTES = 250_000
MOST_SHARDS = 500
TEXT_OPTIONS: dict[str, object] = {
    "layout": "auto", "text_key": "text", "vocab_size": 8192, "num_files": None, "eval_share": 0.05, "layers": 4,
    "hidden_size": 256,
}  # fmt: skip
NOTE = "corpus.json"  # in the download folder: what was made of which text, with the md5 of each file


def write_text(path: Path, documents: list[Document]) -> None:
    """One sentence a line, a blank line after each document."""
    with atomic_file(path) as partial:
        partial.write_text("".join("\n".join(document) + "\n\n" for document in documents), encoding="utf-8")


def train_vocabulary(paths: list[Path], size: int, target: Path, lower_case: bool = True) -> None:
    """Trains a WordPiece vocabulary of at most `size` tokens, uncased or cased.

    Which of two equally frequent pairs is merged first hangs on the order in which the trainer meets the characters,
    which is random; naming them all beforehand makes the vocabulary the same every time.
    """
    lines = [line for path in paths for line in normalise(path.read_text("utf-8"), lower_case).split("\n")]
    characters = Counter("".join(lines).replace(" ", ""))
    common = sorted(character for character, _ in characters.most_common(size // 8))
    named = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *common, *(f"##{character}" for character in common)]
    tokenizer = BertWordPieceTokenizer(lowercase=lower_case, strip_accents=lower_case)
    tokenizer.train_from_iterator(
        lines, vocab_size=size, min_frequency=2, limit_alphabet=len(common), special_tokens=named, show_progress=False
    )
    words = tokenizer.get_vocab()
    with atomic_file(target) as partial:
        partial.write_text("".join(f"{word}\n" for word in sorted(words, key=words.__getitem__)), encoding="utf-8")


def bert_config(vocab_size: int, layers: int, hidden_size: int, max_seq_length: int) -> dict[str, object]:
    """A bert_config.json with BERT's proportions: heads of 64, feed-forward four times as wide."""
    return {
        "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": hidden_size, "initializer_range": 0.02, "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": max_seq_length, "num_attention_heads": hidden_size // 64,
        "num_hidden_layers": layers, "type_vocab_size": 2, "vocab_size": vocab_size,
    }  # fmt: skip


def _write(options: argparse.Namespace, documents: list[Document], download: Path) -> str:
    """Writes all files; tells what they hold."""
    step = max(2, round(1 / options.eval_share))  # every n-th document is for evaluation
    held_out = documents[step // 2 :: step]
    train = [document for i, document in enumerate(documents) if i % step != step // 2]
    # The documents in turn to part files, which all get about the same number; two documents each at least.
    size = sum(len(sentence) + 1 for document in train for sentence in document)
    count = min(options.num_files or min(MOST_SHARDS, size // SHARD_BYTES + 1), len(train) // 2) or 1
    text = download / "results4"
    text.mkdir(parents=True, exist_ok=True)
    for old in text.glob("part-*"):
        old.unlink()
    shards = [text / f"part-{i:05d}-of-{count:05d}" for i in range(count)]
    for i, path in enumerate(shards):
        write_text(path, train[i::count])
    write_text(text / "eval.txt", held_out)
    if options.vocab_file:
        with atomic_file(download / "vocab.txt") as partial:
            shutil.copyfile(options.vocab_file, partial)
    else:
        train_vocabulary(shards, options.vocab_size, download / "vocab.txt", options.do_lower_case)
    words = vocabulary.load(download / "vocab.txt")
    config = bert_config(len(words), options.layers, options.hidden_size, options.max_seq_length)
    with atomic_file(download / "bert_config.json") as partial:
        partial.write_text(json.dumps(config, indent=2) + "\n")
    made = f"{len(train)} documents ({human_bytes(sum(path.stat().st_size for path in shards))}) in {count} files"
    return f"{made}, {len(held_out)} for evaluation, {len(words)} tokens in the vocabulary"


def _files(download: Path) -> dict[str, str]:
    """md5 of every file that a corpus is made of."""
    paths = [*(download / "results4").glob("part-*"), download / "results4" / "eval.txt"]
    paths += [download / name for name in ("vocab.txt", "bert_config.json")]
    return {str(path.relative_to(download)): md5_of(path) for path in sorted(paths) if path.is_file()}


def _note(path: Path, recipe: dict[str, object], files: dict[str, str]) -> None:
    with atomic_file(path) as partial:
        partial.write_text(json.dumps({"recipe": recipe, "files": files}, indent=1) + "\n")


def make(options: argparse.Namespace, download: Path) -> None:
    """Makes the text, vocabulary and model size of a preparation, unless they were made so already.

    Args:
        options: of `add_text_options` and `add_lower_case`, and input, vocab_file and max_seq_length.
        download: folder to write to.

    Raises:
        DataError: the input cannot be read or used.
    """
    if options.hidden_size % 64:
        raise DataError(f"--hidden-size {options.hidden_size} is not a multiple of 64 (the width of an attention head)")
    vocab_md5 = vocabulary.load(options.vocab_file).md5 if options.vocab_file else ""
    pool = read_pool(options.input, options.layout, options.text_key)
    named = {name: getattr(options, name) for name in (*TEXT_OPTIONS, "max_seq_length")}
    recipe = {"text": pool.md5, "vocab_file": vocab_md5, **named}
    if not options.do_lower_case:
        recipe["do_lower_case"] = False
    note, made = download / NOTE, None
    with suppress(OSError, ValueError):
        made = json.loads(note.read_text(encoding="utf-8"))
    if made == {"recipe": recipe, "files": _files(download)}:
        print(f"{' '.join(options.input)}: {download} was made of this text already; nothing to do", file=sys.stderr)
        return
    if not note.exists() and any((download / "results4").glob("part-*")):
        others = f"{download}/results4 has a text that was not made by this command"
        raise DataError(f"{others}; move it, or give another folder")
    download.mkdir(parents=True, exist_ok=True)
    _note(note, recipe, {})  # no files as long as it is not finished
    summary = _write(options, pool.documents, download)
    _note(note, recipe, _files(download))
    print(f"{' '.join(options.input)}: read as {', '.join(pool.kinds)}; {summary}", file=sys.stderr)


def add_text_options(parser: argparse._ActionsContainer) -> None:
    """What is made of a text, and how it is read; the defaults are those of TEXT_OPTIONS."""
    parser.add_argument("--text-key", help="of JSON Lines and Parquet (default %(default)s)")
    parser.add_argument("--layout", choices=("auto", *LAYOUTS), help="of plain text (default %(default)s)")
    parser.add_argument("--vocab-size", type=positive, help="of the trained vocabulary (default %(default)s)")
    parser.add_argument("--num-files", type=positive, help="part files (default: one per 250 kB, at most 500)")
    parser.add_argument("--eval-share", type=_share, help="of the documents (default %(default)s)")
    parser.add_argument("--layers", type=positive, help="of bert_config.json (default %(default)s)")
    parser.add_argument("--hidden-size", type=positive, help="of bert_config.json (default %(default)s)")
    parser.set_defaults(**TEXT_OPTIONS)


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", required=True, nargs="+", help="files or folders of text, or 'pydoc': one pool")
    parser.add_argument("--outputdir", type=Path, required=True, help="where prepare_data.sh will look")
    parser.add_argument("--vocab-file", type=Path, help="a vocab.txt to use (default: train one)")
    add_text_options(parser)
    add_lower_case(parser)
    parser.add_argument("--max-seq-length", type=positive, default=512, help="(default %(default)s)")
    options = parser.parse_args()
    make(options, options.outputdir / "download")


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 0.5:
        raise argparse.ArgumentTypeError(f"{value} is not above 0 and at most 0.5")
    return value
