"""Damages prepared data by seed, and has `verify` judge it: nothing damaged may pass.

    python -m tests.input_preprocessing.mutations --count 500 --seed 1

Values, attributes, headers, whole files and manifests are changed, one at a time. Each must be
refused in words that name the file; a bit of a header that no reader reads may pass, which is
checked by reading. Prints one line, and a line for each that was accepted or not named; exit status
1 if there are any. One of them again: --only NUMBER.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from bert.data.format import open_records
from bert.data.hdf5 import open_hdf5
from bert.data.records import DataError
from input_preprocessing.verify.verdict import failures, verify

from .conftest import made_up_documents, make, write_documents

MANIFEST = "prepared-packed.json"
_PATIENCE = 300  # seconds that judging one may take before it counts as a hang


def record_files(folder: Path) -> list[Path]:
    return [
        *sorted((folder / "packed_data").glob("part_*")),
        folder / "eval/part_eval_10k.hdf5",
    ]


def flip_bit(draw: random.Random, path: Path, start: int, end: int) -> str:
    data = bytearray(path.read_bytes())
    at, bit = draw.randrange(start, end), draw.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at}"


def change_value(draw: random.Random, folder: Path) -> tuple[Path, str]:
    path = draw.choice(record_files(folder))
    datasets = open_hdf5(path).datasets
    name = draw.choice(sorted(datasets))
    start = datasets[name].offset or 0
    size = datasets[name].shape[0] * datasets[name].dtype.itemsize
    return path, f"{flip_bit(draw, path, start, start + size)} in {name}"


def change_header(draw: random.Random, folder: Path) -> tuple[Path, str]:
    path = draw.choice(record_files(folder))
    size = min(each.offset or 0 for each in open_hdf5(path).datasets.values())
    return path, flip_bit(draw, path, 0, size)


def change_attribute(draw: random.Random, folder: Path) -> tuple[Path, str]:
    path = draw.choice(record_files(folder))
    with h5py.File(path, "r+") as file:
        name = draw.choice(sorted(file.attrs))
        value = file.attrs[name]
        if draw.random() < 0.3:
            del file.attrs[name]
        elif isinstance(value, str):
            at = draw.randrange(len(value))
            digit = "1" if value[at] == "0" else "0"
            file.attrs[name] = value[:at] + digit + value[at + 1 :]
        else:
            file.attrs[name] = int(value) + draw.choice([-1, 1, 2**31])
    return path, f"attribute {name}"


def change_file(draw: random.Random, folder: Path) -> tuple[Path, str]:
    records = record_files(folder)
    names = "phase1/vocab.txt", "phase1/bert_config.json", "packed_data/index.json"
    path = draw.choice([*records, *(folder / name for name in names)])
    data = path.read_bytes()
    how = draw.choice(["gone", "empty", "cut", "bit", "another", "more"])
    if how == "gone":
        path.unlink()
    elif how == "bit":
        return path, flip_bit(draw, path, 0, len(data))
    elif how == "another":
        shutil.copy(draw.choice([each for each in records if each != path]), path)
    elif how == "more":
        # Beside the records: phase1 is not read by any trainer.
        place = folder / "eval" if path.parent.name == "phase1" else path.parent
        path = place / f"more{draw.choice(['', '.hdf5', '.hdf', '.h5'])}"
        shutil.copy(draw.choice(records), path)
    else:
        path.write_bytes(data[: 0 if how == "empty" else draw.randrange(1, len(data))])
    return path, how


def change_manifest(draw: random.Random, folder: Path) -> tuple[Path, str]:
    path = folder / MANIFEST
    entries: dict[str, Any] = json.loads(path.read_text())
    name = draw.choice(sorted(entries))
    value = entries[name]
    if isinstance(value, dict):
        key = draw.choice(sorted(value) or ["x"])
        if draw.random() < 0.4:
            value.pop(key, None) or value.update({key: "x"})
        elif isinstance(value.get(key), int):
            value[key] = 7
        else:
            value[key] = str(value.get(key))[:-1] + "x"
        name = f"{name}[{key}]"
    elif draw.random() < 0.3:
        del entries[name]
    elif isinstance(value, str):
        entries[name] = value[:-1] + ("1" if value[-1:] == "0" else "0")
    else:
        entries[name] = draw.choice([value + 1, 0, -1, None, str(value), 1e300])
    path.write_text(json.dumps(entries, indent=1) + "\n")
    if draw.random() < 0.1:
        return path, flip_bit(draw, path, 0, path.stat().st_size)
    return path, name


CHANGES: dict[str, Callable[[random.Random, Path], tuple[Path, str]]] = {
    "value": change_value, "attribute": change_attribute, "header": change_header,
    "file": change_file, "manifest": change_manifest,
}  # fmt: skip


def contents(path: Path) -> object:
    """All that a reader sees of a record file."""
    records, metadata = open_records(path)
    arrays = vars(records).items()
    return {name: a if a is None else a.tobytes() for name, a in arrays}, metadata


def judge(folder: Path) -> str:
    """What `verify` has against the folder, in words; empty if nothing."""
    try:
        return "; ".join(failures(verify(folder, jobs=1)))
    except DataError as error:
        return str(error)


def mutate(
    folder: Path, count: int, seed: int, only: int | None = None
) -> Counter[str]:
    """Changes a prepared folder `count` times, and back; prints and counts what became of it."""
    found: Counter[str] = Counter()
    spare = folder.with_name(f"{folder.name}.spare")
    shutil.rmtree(spare, ignore_errors=True)
    for number in range(count) if only is None else [only]:
        draw = random.Random(f"{seed} {number}")
        kind = list(CHANGES)[number % len(CHANGES)]
        shutil.copytree(folder, spare)
        try:
            path, what = CHANGES[kind](draw, spare)
            signal.alarm(_PATIENCE)
            problem = judge(spare)
            # A manifest that contradicts a file may as well be told by the file's name.
            others = record_files(spare) if kind == "manifest" else []
            names = [each.name for each in (path, *others)]
            if any(name in problem for name in names) and "\n" not in problem:
                became = "refused"
            elif problem:
                became = "not named"
            else:
                before = folder / path.relative_to(spare)
                same = path.suffix == ".hdf5" and contents(path) == contents(before)
                became = "unseen" if same else "ACCEPTED"
            signal.alarm(0)
            found[became] += 1
            if became in ("ACCEPTED", "not named"):
                place = path.relative_to(spare)
                print(f"{number}: {kind}: {place}: {what}: {became}: {problem}")
        finally:
            shutil.rmtree(spare)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--only", type=int, help="number of a single one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, text = Path(name) / "data", Path(name) / "text"
        write_documents(text, made_up_documents(60))
        make(folder, "--input", str(text), "--vocab-size", "800")
        found = mutate(folder, options.count, options.seed, options.only)
    total = ", ".join(f"{number} {what}" for what, number in sorted(found.items()))
    print(f"{sum(found.values())} mutations, seed {options.seed}: {total}")
    return int(bool(found["ACCEPTED"] or found["not named"]))


if __name__ == "__main__":
    sys.exit(main())
