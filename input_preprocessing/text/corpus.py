"""Makes a corpus for `prepare_data.sh` of any text: shards of sentences, evaluation text, vocabulary, model size.

Writes to OUTPUTDIR/download: results4/part-XXXXX-of-XXXXX and results4/eval.txt (one sentence per line, a blank line
between documents; the evaluation text is every n-th document and not in the shards), vocab.txt (a WordPiece vocabulary
trained on the shards, unless one is given) and bert_config.json of a small BERT with that vocabulary.

Inputs are files, and folders with all text below them, read as one pool: plain text (UTF-8), JSON Lines and Parquet
(--text-key names the field), WikiExtractor's <doc> files; the contents tell which. Plain text may have one sentence per
line and a blank line between documents, or be prose; which of the two is detected and printed, --layout decides. A
text of any size takes the same memory, and its size of disk beside OUTPUTDIR until it is written. `--input pydoc` is
the language reference that comes with Python (PSF licence): real English prose that needs no download.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TextIO

from tokenizers import BertWordPieceTokenizer

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.stage.cli import add_lower_case, human_bytes, positive
from input_preprocessing.stage.manifest import md5_of, write_text
from input_preprocessing.stage.reading import CHUNK, changed, open_text, stamp_of
from input_preprocessing.text import vocabulary
from input_preprocessing.text.tokenization import normalise

LAYOUTS = {"sentences": "one sentence per line", "prose": "prose, cut into sentences"}  # by name, for people
MOST_SENTENCES = 200  # of a prose document
FEWEST_DOCUMENTS = 4
PYDOC = "pydoc"
_DETECTED_ON = 2_000_000  # characters
_MOST_OPEN = 200  # files
_PARQUET = b"PAR1"
_EXTRACTED = re.compile(r"<doc [^>]*>\n(.*?)\n?</doc>", re.DOTALL)
_NO_TEXT = re.compile(r"\.|README|LICENSE|.*\.(json|md5|gitattributes)$", re.IGNORECASE)
_END = re.compile(r"""(?<=[.!?])["')\]”’]*\s+(?=["'(\[“‘]*[A-Z0-9])""")
_RULE = re.compile(r"[^\w\s](?:\W*[^\w\s])?\s*")  # a line under a heading or between parts
_TERMINATED = re.compile(r"""[.!?:;]["')\]”’]*$""")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Rev|Gen|Col|Capt|Lt|Hon|vs|e\.g|i\.e|cf|Fig|No|Vol|pp?|ch|sec|ed|al|approx)"
    r"|\b[A-Z])\.$"
)

Document = list[str]


class Pool(NamedTuple):
    """Documents of all inputs."""

    spool: TextIO  # a nameless file of them: a sentence a line, a blank line after each document
    kinds: tuple[str, ...]  # what the files were read as, for people
    md5: str  # of the text

    @property
    def documents(self) -> Iterator[Document]:
        """From the first on; one such pass at a time."""
        self.spool.seek(0)
        return documents_of(self.spool, "sentences")


def read_pool(inputs: Sequence[str], layout: str, text_key: str, folder: Path | None = None) -> Pool:
    """The documents of files and folders (and of 'pydoc'), in the order given.

    Args:
        inputs: names; of a folder all files below it are read, by name.
        layout: of plain text and of records: a key of LAYOUTS, or 'auto'.
        text_key: field of JSON Lines and column of Parquet that holds the text.
        folder: whose disk holds the documents meanwhile; None: TMPDIR.

    Raises:
        DataError: unreadable, of another encoding, without the key, or too few documents.
    """
    # Nameless: gone with this process, however that ends.
    spool = tempfile.TemporaryFile("w+", encoding="utf-8", errors="ignore", newline="\n", dir=folder)  # noqa: SIM115
    count = 0
    kinds: dict[str, None] = {}
    digests = []
    for name in inputs:
        files = [Path(name)]
        if name != PYDOC and files[0].is_dir():
            files = sorted(file for file in files[0].rglob("*") if file.is_file() and not _NO_TEXT.match(file.name))
            if not files:
                raise DataError(f"{name} has no files of text; check --input")
        for path in files:
            if name == PYDOC:
                documents: Iterable[Document] = pydoc_documents()
                kind, md5 = LAYOUTS["prose"], hashlib.md5(repr(documents).encode()).hexdigest()
            else:
                documents, kind, md5 = _read(path, layout, text_key)
            for document in documents:
                spool.write(_written(document))
                count += 1
            kinds[kind] = None
            digests.append(md5)
    if count < FEWEST_DOCUMENTS:
        gap = "a blank line" if LAYOUTS["sentences"] in kinds else "two blank lines"
        has = f"{' '.join(inputs)} has {count} document{'s' * (count != 1)} (read as {', '.join(kinds)})"
        told = f"{has}, at least {FEWEST_DOCUMENTS} are needed"
        raise DataError(f"{told}; put {gap} between documents, or give more text")
    md5 = digests[0] if len(digests) == 1 else hashlib.md5(" ".join(digests).encode()).hexdigest()
    return Pool(spool, tuple(kinds), md5)


def pydoc_documents() -> list[Document]:
    """Documents of Python's own language reference, a topic each."""
    from pydoc_data.topics import topics

    return [document for name in sorted(topics) for document in documents_of(topics[name].split("\n"), "prose")]


def detect_layout(text: str) -> str:
    """'sentences' when most lines end a sentence and few hold several; else 'prose'."""
    lines = [line.strip() for line in text[:_DETECTED_ON].splitlines() if line.strip()]
    if not lines:
        return "sentences"
    ended = sum(bool(_TERMINATED.search(line)) for line in lines)
    several = sum(len(split_sentences(line)) > 1 for line in lines)
    return "sentences" if ended >= 0.6 * len(lines) and several <= 0.3 * len(lines) else "prose"


def split_sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph: cut after . ! ? before a capital or digit, but not after abbreviations and initials."""
    sentences = []
    start = 0
    for end in _END.finditer(paragraph):
        if not _ABBREVIATION.search(paragraph, start, end.start()):
            sentences.append(paragraph[start : end.end()].strip())
            start = end.end()
    return [sentence for sentence in [*sentences, paragraph[start:].strip()] if sentence]


def documents_of(lines: Iterable[str], layout: str) -> Iterator[Document]:
    """The documents of a text's lines in the layout given, without empty ones."""
    document: Document = []
    if layout == "sentences":
        for line in lines:
            if line.strip():
                document.append(line.strip())
            elif document:
                yield document
                document = []
    else:
        paragraph: list[str] = []
        blank = 0  # lines in a row; two end a document, as a form feed does, one a paragraph
        for line in chain(lines, "\f"):
            if _RULE.fullmatch(line):
                continue
            for number, piece in enumerate(line.split("\f")):
                blank = 0 if piece.strip() else blank + 1
                if number or blank:
                    document += split_sentences(" ".join(" ".join(paragraph).split()))
                    paragraph = []
                if document and (number or blank > 1 or len(document) >= MOST_SENTENCES):
                    yield document
                    document = []
                paragraph.append(piece)
    if document:
        yield document


def _written(document: Document) -> str:
    """One sentence a line, a blank line after the document."""
    return "\n".join(document) + "\n\n"


def _read(path: Path, layout: str, text_key: str) -> tuple[Iterator[Document], str, str]:
    """Documents of a file, what it is read as, and its md5."""
    with suppress(OSError):  # reading it says why
        if path.is_file():  # what is read of a pipe is gone
            with open(path, "rb") as start:
                if start.read(len(_PARQUET)) == _PARQUET:
                    return _of_records(_parquet(path, text_key), layout), "Parquet", md5_of(path)
    file, md5 = open_text(path, "--input")
    stamp = stamp_of(os.fstat(file.fileno()))

    def text(newline: str | None = "") -> TextIO:
        file.seek(0)
        return open(os.dup(file.fileno()), encoding="utf-8", errors="ignore", newline=newline)

    def unchanged(documents: Iterable[Document]) -> Iterator[Document]:
        with file:
            yield from documents
            if stamp_of(os.fstat(file.fileno())) != stamp:
                raise changed(path)

    with text() as lines:
        start_of_text = lines.read(_DETECTED_ON)
    if start_of_text.startswith("<doc "):
        return unchanged(_of_records(_extracted(text()), "prose")), "WikiExtractor's documents", md5
    if start_of_text.startswith("{"):
        return unchanged(_of_records(_json_lines(path, text("\n"), text_key), layout)), "JSON Lines", md5
    found = detect_layout(start_of_text) if layout == "auto" else layout
    return unchanged(documents_of(text(None), found)), LAYOUTS[found], md5


def _of_records(texts: Iterable[str], layout: str) -> Iterator[Document]:
    """A document of each text that has a sentence."""
    texts, start, length = iter(texts), [], 0
    if layout == "auto":
        for text in texts:
            start.append(text)
            length += len(text)
            if length > _DETECTED_ON:
                break
        layout = detect_layout("\n".join(start))
    for text in chain(start, texts):
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        if document := [line for part in documents_of(lines, layout) for line in part]:
            yield document


def _extracted(text: TextIO) -> Iterator[str]:
    """The articles of WikiExtractor's file, less their titles."""
    rest = ""
    while chunk := text.read(CHUNK):
        rest += chunk
        end = 0
        for match in _EXTRACTED.finditer(rest):
            yield html.unescape(match[1]).partition("\n")[2]
            end = match.end()
        rest = rest[end:]


def _json_lines(path: Path, lines: Iterable[str], key: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error}); give JSON Lines, a record a line") from error
        if not isinstance(record, dict) or not isinstance(record.get(key), str):
            fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(f"{path}: line {number} has no text {key!r} (it has {fields}); give --text-key")
        yield record[key]


def _parquet(path: Path, key: str) -> Iterator[str]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow; run: python -m pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if key not in columns:
                raise DataError(f"{path} has no column {key!r} (it has {', '.join(columns)}); give --text-key")
            for batch in file.iter_batches(columns=[key]):
                yield from (value for value in batch.column(0).to_pylist() if isinstance(value, str))
    except (OSError, ValueError) as error:  # pyarrow's errors are both
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as Parquet ({str(error).splitlines()[0]}); copy it again") from error


SHARD_BYTES = 250_000
MOST_SHARDS = 500
TEXT_OPTIONS: dict[str, object] = {
    "layout": "auto", "text_key": "text", "vocab_size": 8192, "num_files": None, "eval_share": 0.05, "layers": 4,
    "hidden_size": 256,
}  # fmt: skip
NOTE = "corpus.json"  # in the download folder: what was made of which text, with the md5 of each file


def train_vocabulary(paths: list[Path], size: int, target: Path, lower_case: bool = True) -> None:
    """Trains a WordPiece vocabulary of at most `size` tokens, uncased or cased.

    Which of two equally frequent pairs is merged first hangs on the order in which the trainer meets the characters,
    which is random; naming them all beforehand makes the vocabulary the same every time.
    """

    def lines() -> Iterator[str]:
        for path in paths:
            with open(path, encoding="utf-8") as file:
                while block := file.readlines(1 << 20):
                    yield from normalise("".join(block), lower_case).split("\n")

    characters: Counter[str] = Counter()
    for line in lines():
        characters.update(line.replace(" ", ""))
    common = sorted(character for character, _ in characters.most_common(size // 8))
    named = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *common, *(f"##{character}" for character in common)]
    tokenizer = BertWordPieceTokenizer(lowercase=lower_case, strip_accents=lower_case)
    tokenizer.train_from_iterator(
        lines(), vocab_size=size, min_frequency=2, limit_alphabet=len(common), special_tokens=named, show_progress=False
    )
    words = tokenizer.get_vocab()
    write_text(target, "".join(f"{word}\n" for word in sorted(words, key=words.__getitem__)))


def bert_config(vocab_size: int, layers: int, hidden_size: int, max_seq_length: int) -> dict[str, object]:
    """A bert_config.json with BERT's proportions: heads of 64, feed-forward four times as wide."""
    return {
        "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": hidden_size, "initializer_range": 0.02, "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": max_seq_length, "num_attention_heads": hidden_size // 64,
        "num_hidden_layers": layers, "type_vocab_size": 2, "vocab_size": vocab_size,
    }  # fmt: skip


def _write(options: argparse.Namespace, pool: Pool, download: Path) -> str:
    """Writes all files; tells what they hold."""
    step = max(2, round(1 / options.eval_share))  # every n-th document is for evaluation
    size, numbers = 0, [0, 0]  # of documents: to train on, held out
    for i, document in enumerate(pool.documents):
        is_held_out = i % step == step // 2
        numbers[is_held_out] += 1
        size += 0 if is_held_out else sum(len(sentence) + 1 for sentence in document)
    # The documents in turn to part files, which all get about the same number; two documents each at least.
    count = min(options.num_files or min(MOST_SHARDS, size // SHARD_BYTES + 1), numbers[0] // 2) or 1
    text = download / "results4"
    text.mkdir(parents=True, exist_ok=True)
    for old in text.glob("part-*"):
        old.unlink()
    shards = [text / f"part-{i:05d}-of-{count:05d}" for i in range(count)]
    targets = dict(enumerate([*shards, text / "eval.txt"]))
    while targets:  # as many as may be open at once
        with ExitStack() as stack:
            files = {}
            for number in list(targets)[:_MOST_OPEN]:
                partial = stack.enter_context(atomic_file(targets.pop(number)))
                files[number] = stack.enter_context(open(partial, "w", encoding="utf-8"))
            trained = 0
            for i, document in enumerate(pool.documents):
                if i % step == step // 2:
                    number = count
                else:
                    number, trained = trained % count, trained + 1
                if number in files:
                    files[number].write(_written(document))
    if options.vocab_file:
        with atomic_file(download / "vocab.txt") as partial:
            shutil.copyfile(options.vocab_file, partial)
    else:
        train_vocabulary(shards, options.vocab_size, download / "vocab.txt", options.do_lower_case)
    words = vocabulary.load(download / "vocab.txt")
    config = bert_config(len(words), options.layers, options.hidden_size, options.max_seq_length)
    write_text(download / "bert_config.json", json.dumps(config, indent=2) + "\n")
    made = f"{numbers[0]} documents ({human_bytes(sum(path.stat().st_size for path in shards))}) in {count} files"
    return f"{made}, {numbers[1]} for evaluation, {len(words)} tokens in the vocabulary"


def _files(download: Path) -> dict[str, str]:
    """md5 of every file that a corpus is made of."""
    paths = [*(download / "results4").glob("part-*"), download / "results4" / "eval.txt"]
    paths += [download / name for name in ("vocab.txt", "bert_config.json")]
    return {str(path.relative_to(download)): md5_of(path) for path in sorted(paths) if path.is_file()}


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
    disk = next(folder for folder in (download, *download.absolute().parents) if folder.is_dir())
    pool = read_pool(options.input, options.layout, options.text_key, disk)
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
    write_text(note, json.dumps({"recipe": recipe, "files": {}}, indent=1) + "\n")  # as long as it is not finished
    summary = _write(options, pool, download)
    write_text(note, json.dumps({"recipe": recipe, "files": _files(download)}, indent=1) + "\n")
    print(f"{' '.join(options.input)}: read as {', '.join(pool.kinds)}; {summary}", file=sys.stderr)


def add_text_options(parser: argparse._ActionsContainer) -> None:
    """Options for reading a text and for the corpus made of it, with the defaults of TEXT_OPTIONS."""
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
