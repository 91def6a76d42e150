"""Fetches SQuAD or tasks of GLUE for run_finetuning.sh, resuming what was begun, and checks them.

Each task becomes a folder OUTPUTDIR/NAME for DATA: SQuAD's four files are known by their md5, GLUE's archives by their
sha256, the tables in them by how many examples have which label, which does not tell a changed sentence.
--skip-download checks what was put there by hand. MRPC is made, as GLUE makes it, of Microsoft's pairs and GLUE's list
of those that are for development.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.dataset.download import PublicFile, fetch_file
from input_preprocessing.stage.cli import named_folder

_SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
_GLUE = "https://dl.fbaipublicfiles.com/glue/data"
_SENTEVAL = "https://dl.fbaipublicfiles.com/senteval/senteval_data"


def _file(name: str, base: str, size: int, sha256: str) -> PublicFile:
    return PublicFile(name, f"sha256 {sha256}", size, url=f"{base}/{name}")


_SQUAD_MD5 = {
    "train-v1.1.json": "981b29407e0affa3b1b156f72073b945", "dev-v1.1.json": "3e85deb501d4e538b6bc56f786231552",
    "train-v2.0.json": "62108c273c268d70893182d5cf8df740", "dev-v2.0.json": "246adae8b7002f8679c027697b0b7cf8",
}  # fmt: skip
SQUAD = tuple(PublicFile(name, f"md5 {md5}", url=f"{_SQUAD}/{name}") for name, md5 in _SQUAD_MD5.items())
# Where each table comes from. Sizes and sha256 are those that TensorFlow Datasets and Hugging Face's datasets recorded.
SOURCES: dict[str, tuple[PublicFile, ...]] = {
    "MRPC": (
        _file(
            "msr_paraphrase_train.txt", _SENTEVAL, 1_047_044,
            "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
        ),
        _file("mrpc_dev_ids.tsv", _GLUE, 6_222, "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7"),
    ),
    } | {
    name.removesuffix(".zip").removesuffix("-clean").removesuffix("v2"): (_file(name, _GLUE, size, sha256),)
    for name, size, sha256 in (
        ("SST-2.zip", 7_439_277, "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"),
        ("CoLA.zip", 376_971, "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"),
        ("MNLI.zip", 312_783_507, "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633"),
        ("QQP-clean.zip", 41_696_084, "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"),
        ("QNLIv2.zip", 10_627_589, "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"),
        ("RTE.zip", 697_150, "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"),
        ("STS-B.zip", 802_872, "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"),
        ("WNLI.zip", 28_999, "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46"),
    )
}  # fmt: skip
# Examples of each label in each table ("": of all), as both count them; nobody recorded digests of the tables.
TABLES: dict[str, dict[str, dict[str, int]]] = {
    "MRPC": {"train.tsv": {"0": 1_194, "1": 2_474}, "dev.tsv": {"0": 129, "1": 279}},
    "SST-2": {"train.tsv": {"0": 29_780, "1": 37_569}, "dev.tsv": {"0": 428, "1": 444}, "test.tsv": {"": 1_821}},
    "CoLA": {"train.tsv": {"0": 2_528, "1": 6_023}, "dev.tsv": {"0": 322, "1": 721}, "test.tsv": {"": 1_063}},
    "MNLI": {
        "train.tsv": {"contradiction": 130_903, "entailment": 130_899, "neutral": 130_900},
        "dev_matched.tsv": {"contradiction": 3_213, "entailment": 3_479, "neutral": 3_123},
        "dev_mismatched.tsv": {"": 9_832}, "test_matched.tsv": {"": 9_796}, "test_mismatched.tsv": {"": 9_847},
    },
} | {
    task: {"train.tsv": {"": train}, "dev.tsv": {"": dev}, "test.tsv": {"": test}}
    for task, train, dev, test in (
        ("QQP", 363_846, 40_430, 390_965), ("QNLI", 104_743, 5_463, 5_463), ("RTE", 2_490, 277, 3_000),
        ("STS-B", 5_749, 1_500, 1_379), ("WNLI", 635, 71, 146),
    )
}  # fmt: skip
_UNLABELLED = ("test.tsv", "test_matched.tsv", "test_mismatched.tsv")  # which only GLUE's server needs
_LABEL = {"MRPC": 0, "SST-2": 1, "CoLA": 1, "MNLI": -1}  # its column


def fetch(task: str, folder: Path, mirror: str | None) -> None:
    """Brings the files of a task to ``folder``, those that are not there, and checks them. Raises DataError."""
    folder.mkdir(parents=True, exist_ok=True)
    if task == "squad":
        for file in SQUAD:
            fetch_file(file, folder, mirror)
        return
    if not all((folder / name).is_file() for name in TABLES[task] if name not in _UNLABELLED):
        sources = [fetch_file(file, folder, mirror) for file in SOURCES[task]]
        for name, content in (_mrpc(*sources) if task == "MRPC" else _unzipped(task, *sources)).items():
            with atomic_file(folder / name) as partial:
                partial.write_bytes(content)
    check(task, folder)
    for file in SOURCES[task]:
        (folder / file.name).unlink(missing_ok=True)


def _mrpc(pairs: Path, listed: Path) -> dict[str, bytes]:
    header, *lines = (line.rstrip("\r") for line in _lines(pairs))
    ids = {tuple(line.split()) for line in _lines(listed)}
    tables = {"train.tsv": [header], "dev.tsv": [header]}
    for line in lines:
        tables["dev.tsv" if tuple(line.split("\t")[1:3]) in ids else "train.tsv"].append(line)
    return {name: ("\n".join(table) + "\n").encode() for name, table in tables.items()}


def _unzipped(task: str, archive: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(archive) as zipped:
            here = [name for name in TABLES[task] if name not in _UNLABELLED or f"{task}/{name}" in zipped.namelist()]
            return {name: zipped.read(f"{task}/{name}") for name in here}  # which checks its CRC
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot unpack {archive}: {error}; remove it and run again") from error


def check(task: str, folder: Path) -> None:
    """Raises DataError where a file of the task is missing or is not the published one."""
    published = {file.name: file for file in SQUAD} if task == "squad" else {}
    for name in published or TABLES[task]:
        if not (folder / name).is_file() and name not in _UNLABELLED:
            raise DataError(f"{folder / name} is missing; put it there, or run without --skip-download")
    for name, file in published.items():
        if file.digest_of(folder / name) != file.digest:
            raise DataError(f"{folder / name} is not the published file ({file.digest}); remove it")
    for name, wanted in TABLES.get(task, {}).items():
        if not (folder / name).is_file():
            continue
        has_header = task != "CoLA" or name in _UNLABELLED
        rows = [line.split("\t") for line in _lines(folder / name)][has_header:]
        counts_all = "" in wanted
        found = Counter(row[_LABEL[task]].strip() if len(row) > 1 and not counts_all else "" for row in rows)
        if found != wanted:
            told = f"has {_told(found, wanted)}, GLUE's has {_told(wanted, wanted)}"
            raise DataError(f"{folder / name} {told}: remove it and run again")


def _told(counts: Mapping[str, int], labels: Iterable[str]) -> str:
    each = ", ".join(f"{counts.get(label, 0):,} of label {label}" for label in labels if label)
    return f"{sum(counts.values()):,} examples{f' ({each})' if each else ''}"


def _lines(path: Path) -> list[str]:
    """The lines of a table that are not empty; only line feeds end one."""
    return [line for line in path.read_bytes().decode("utf-8-sig", "replace").split("\n") if line.strip()]


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--outputdir", type=named_folder, required=True, help="the tasks' folders go there")
    parser.add_argument("--task", nargs="+", choices=("squad", *TABLES), default=["squad"], help="(default squad)")
    parser.add_argument("--mirror", help="URL or folder that holds the files under their names")
    parser.add_argument("--skip-download", action="store_true", help="check what is in OUTPUTDIR")
    options = parser.parse_args()
    for task in options.task:
        folder = options.outputdir / task
        if options.skip_download:
            check(task, folder)
        else:
            fetch(task, folder, options.mirror)
        print(f"{folder}: complete and checked", file=sys.stderr)
