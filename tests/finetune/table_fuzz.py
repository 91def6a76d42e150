"""Random tables as programs write them, read by ``finetune.dialect`` and by others.

    python tests/finetune/table_fuzz.py --tables 10000 --seed 1 --rivals

prints one line a dialect: right, refused and wrong, of ours and of the rivals that are installed
(pandas with its separator found, clevercsv, csv.Sniffer).
"""

import argparse
import csv
import io
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bert.data.records import DataError
from finetune import dialect

Table = list[list[str]]
_WORDS = "a good film that nobody needs but the café was fine and I said no"
_TRICKS = [
    "well, yes", "so; so", "a|b", 'the "best"', '"Fine."', '"Yes, I did," he said', "it's",
    "C:\\new\\dir", "\\d+", "5\" pipe", " padded", "1,5 EUR", "x = {a: 1}", "日本語", "\\", "''", "- no -",
]  # fmt: skip
_BREAKS = ["one\ntwo", "tab\there", 'he: "one,\ntwo"', "\n"]


def text(generator: random.Random, breaks: bool) -> str:
    words = generator.choices(_WORDS.split(), k=generator.randint(1, 12))
    tricks = _TRICKS + (_BREAKS if breaks else [])
    for _ in range(generator.choice([0, 0, 0, 1, 2])):
        words.insert(generator.randrange(len(words) + 1), generator.choice(tricks))
    kind = generator.random()
    if kind < 0.05:
        return generator.choice(tricks)
    if kind < 0.12:
        return '"' + " ".join(words).replace('"', "") + '"'
    return " ".join(words)


def make(generator: random.Random, breaks: bool, one: bool) -> Table:
    """A table with a header."""
    columns: list[tuple[str, Callable[[int], str]]] = [
        ("text", lambda _: text(generator, breaks)),
        ("label", lambda _: generator.choice(["pos", "neg"])),
        ("stars", lambda _: str(generator.randint(1, 5))),
        ("price", lambda _: f"{generator.uniform(1, 99):.2f}"),
        ("title", lambda _: text(generator, breaks)),
        ("date", lambda n: f"2024-01-{n % 28 + 1:02d}"),
        ("note", lambda _: generator.choice(["", "", "seen, twice", "n/a"])),
    ]
    more = generator.sample(columns[2:], generator.randint(0, 3))
    chosen = columns[:1] if one else [*columns[:2], *more]
    count = generator.choice([2, 5, 12, 40])
    rows = [[value(number) for _, value in chosen] for number in range(count)]
    return [[name for name, _ in chosen], *rows]


def written(table: Table, **how: Any) -> str:
    target = io.StringIO(newline="")
    csv.writer(target, **{"lineterminator": "\n", **how}).writerows(table)
    return target.getvalue()


def is_word(cell: str) -> bool:
    return not cell.replace(".", "", 1).isdigit()


def enclosed(
    table: Table, mark: str, which: Callable[[str], bool], escape='""', end="\n"
) -> str:
    """Cells of one kind in quotation marks, which become ``escape`` within."""

    def cell_of(cell: str) -> str:
        return '"' + cell.replace('"', escape) + '"' if which(cell) else cell

    return "".join(mark.join(map(cell_of, row)) + end for row in table)


def dumped(table: Table, escapes: dict[str, str]) -> str:
    meant = str.maketrans({"\\": "\\\\", **escapes})
    return "".join("\t".join(c.translate(meant) for c in row) + "\n" for row in table)


def numbered(table: Table) -> Table:
    head, *rows = table
    return [["", *head], *([str(n), *row] for n, row in enumerate(rows, 1))]


def r_table(table: Table) -> str:
    """write.table(x, sep = "\\t"): names of rows, but none above them."""
    lines = enclosed(numbered(table), "\t", is_word, escape='\\"')
    return re.sub(r"^(\d+)", r'"\1"', lines.removeprefix('""\t'), flags=re.MULTILINE)


# name: (suffix, whether it can hold line breaks and tabs, one column, writer)
_ALL, _NONE = csv.QUOTE_ALL, csv.QUOTE_NONE
Dialect = tuple[str, bool, bool, Callable[[Table], str]]
DIALECTS: dict[str, Dialect] = {
    "pandas": ("csv", True, False, written),
    "pandas, index": ("csv", True, False, lambda t: written(numbered(t))),
    "pandas ;": ("csv", True, False, lambda t: written(t, delimiter=";")),
    "pandas |": ("txt", True, False, lambda t: written(t, delimiter="|")),
    "pandas tab": ("tsv", True, False, lambda t: written(t, delimiter="\t")),
    "pandas tab .txt": ("txt", True, False, lambda t: written(t, delimiter="\t")),
    "pandas all": ("csv", True, False, lambda t: written(t, quoting=_ALL)),
    "pandas tab all": ("tsv", True, False, lambda t: written(t, delimiter="\t", quoting=_ALL)),
    "pandas strings": ("csv", True, False, lambda t: enclosed(t, ",", is_word)),
    "pandas escapechar": ("csv", True, False, lambda t: written(t, doublequote=False, escapechar="\\")),
    "pandas none": ("csv", False, False, lambda t: written(t, quoting=_NONE, escapechar="\\")),
    "pandas, one column": ("csv", True, True, written),
    "csv, one column, all": ("csv", True, True, lambda t: written(t, quoting=_ALL)),
    "csv": ("csv", True, False, lambda t: written(t, lineterminator="\r\n")),
    "csv excel-tab": ("tsv", True, False, lambda t: written(t, dialect="excel-tab", lineterminator="\r\n")),
    "Excel": ("csv", True, False, lambda t: "\ufeff" + written(t, lineterminator="\r\n")),
    "Excel ;": ("csv", True, False, lambda t: "\ufeff" + written(t, delimiter=";", lineterminator="\r\n")),
    "Excel text": ("txt", True, False, lambda t: enclosed(t, "\t", lambda c: any(x in c for x in '",\t\n'), end="\r\n")),
    "Sheets": ("csv", True, False, lambda t: written(t, lineterminator="\r\n")),
    "Sheets tsv": ("tsv", False, False, lambda t: written(t, delimiter="\t", quoting=_NONE, quotechar=None, lineterminator="\r\n")),
    "R write.csv": ("csv", True, False, lambda t: enclosed(t, ",", is_word)),
    "R write.csv2": ("csv", True, False, lambda t: enclosed(t, ";", is_word)),
    "R write.table": ("txt", False, False, r_table),
    "R quote=FALSE": ("tsv", False, False, lambda t: written(t, delimiter="\t", quoting=_NONE, quotechar=None)),
    "MySQL OUTFILE": ("txt", True, False, lambda t: dumped(t, {"\t": "\\\t", "\n": "\\\n"})),
    "MySQL --batch": ("tsv", True, False, lambda t: dumped(t, {"\t": "\\t", "\n": "\\n"})),
    "Postgres COPY": ("txt", True, False, lambda t: dumped([[c or "\0" for c in r] for r in t], {"\t": "\\t", "\n": "\\n", "\0": "\\N"})),
    "Spark": ("csv", False, False, lambda t: enclosed(t, ",", lambda c: any(x in c for x in '",'), escape='\\"')),
}  # fmt: skip


def meant(name: str, table: Table) -> Table:
    """The cells that a faithful reader finds."""
    if name in ("pandas, index", "R write.table"):
        table = numbered(table)
    if name == "Postgres COPY":
        table = [[cell or "\\N" for cell in row] for row in table]
    return table


def tables(count: int, seed: int) -> Iterator[tuple[str, Path, Table]]:
    """(dialect, file, its cells); the file lasts until the next one."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            name = list(DIALECTS)[number % len(DIALECTS)]
            suffix, breaks, one, write = DIALECTS[name]
            table = make(random.Random(f"{seed} {number}"), breaks, one)
            if name == "Spark":  # doubles backslashes in marks, and leaves the others
                table = [[cell.replace("\\", "/") for cell in row] for row in table]
            path = Path(folder, f"table.{suffix}")
            encoding = "utf-16" if name == "Excel text" else "utf-8"
            path.write_bytes(write(table).encode(encoding))
            yield name, path, meant(name, table)
            path.unlink()


def plain(rows: Table) -> Table:
    return [[c.replace("\r\n", "\n") for c in row] for row in rows]


def ours(path: Path) -> Table:
    return [row for _, row in dialect.read(path, dialect.Reading()).rows]  # type: ignore[misc]


def by_pandas(path: Path) -> Table:
    import pandas

    bom = path.read_bytes()[:2] in (b"\xff\xfe", b"\xfe\xff")
    frame = pandas.read_csv(path, sep=None, engine="python", header=None, dtype=str, keep_default_na=False,
                            skip_blank_lines=False, encoding="utf-16" if bom else "utf-8-sig")  # fmt: skip
    return [list(map(str, row)) for row in frame.itertuples(index=False)]


def sniffed(module: str, path: Path) -> Table:
    reader, data = import_module(module), path.read_bytes()
    text = data.decode("utf-16" if data[:2] == b"\xff\xfe" else "utf-8-sig")
    found = reader.Sniffer().sniff(text)
    return list(reader.reader(io.StringIO(text, newline=""), found))


RIVALS: dict[str, Callable[[Path], Table]] = {
    "pandas": by_pandas,
    "csv": partial(sniffed, "csv"),
    "clevercsv": partial(sniffed, "clevercsv"),
}


def outcome(read: Callable[[Path], Table], path: Path, table: Table) -> str:
    # A rival refuses by whatever it raises.
    refusals = Exception if read in RIVALS.values() else DataError
    try:
        rows = read(path)
    except refusals:
        return "refused"
    return "right" if plain(rows) == plain(table) else "wrong"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=2800)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rivals", action="store_true")
    options = parser.parse_args()
    rivals = filter(find_spec, RIVALS if options.rivals else ())
    readers = {"ours": ours, **{name: RIVALS[name] for name in rivals}}
    counts = Counter[tuple[str, str, str]]()
    for name, path, table in tables(options.tables, options.seed):
        for reader, read in readers.items():
            kind = outcome(read, path, table)
            counts.update((row, reader, kind) for row in (name, "all"))
    names = [f"{reader + ': right refused wrong':>34}" for reader in readers]
    print(" " * 22, *names, sep="")
    for name in (*DIALECTS, "all"):
        cells = [
            f"{counts[name, reader, kind]:>{width},}"
            for reader in readers
            for kind, width in (("right", 20), ("refused", 7), ("wrong", 7))
        ]
        print(f"{name:22}", *cells, sep="")
    return int(counts["all", "ours", "wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
