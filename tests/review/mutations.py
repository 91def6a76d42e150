"""Damages a result folder by seed, and has every command judge it: none may be accepted, none stops
a command, and no two commands disagree.

    python -m tests.review.mutations --count 500 --seed 1

Events, bytes, places, numbers and times of logs, the description, power files and the run's own
record are changed. What the official tools reject or crash on is official nowhere, and a run that
records another model, target or data is never ranked. Prints one line, and a line for each that breaks this; exit status 1 if
there are any. One of them again: --only NUMBER.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from review.__main__ import main as review

from .conftest import OWN, write_power, write_submission
from .verdict.damage import ALL, damage, edit, misplace, official

LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 30522,
}
RECORD: dict[str, Any] = {  # config.json of a run of the benchmark
    "model": LARGE,
    "data": {"max_seq_length": 512, "synthetic": False},
    "evaluate": {"target": 0.72, "every_samples": 150_000},
    "mlperf": {"division": "closed"},
}
# Findings that are no errors, with which a score does not count.
UNOFFICIAL = {"benchmark", "ten_runs_to_submit"}
# What may be there instead of a record: nothing, a folder, a link, or what records nothing.
WITHOUT = (None, "folder", "link", "{}", "[]", '{"model": "x", "mlperf": "y"}')
_OTHERS = (None, 0, 1, 128, 0.1, True, "large", [], {})
KINDS = "events", "places", "bytes", "record", "power", "numbers"
_NUMBERS = (1e308, -1e308, 10**320, float("nan"), float("inf"), 1e15, 0, -1)


def answers(root: Path) -> bool:
    """Whether the official checker comes to an end: it waits for the writer of a pipe."""
    names = ("result_", "package_", "dgx")
    return not any(
        path.is_fifo() for path in root.rglob("*") if path.name.startswith(names)
    )


def mutate(folder: Path, kind: str, choose: random.Random) -> None:
    """Changes a result folder with a record of its run."""
    if kind == "events":
        damage(folder, choose)
    elif kind == "places":
        misplace(folder, choose)
    elif kind == "bytes":
        _change_bytes(
            choose.choice([*folder.glob("result_*.txt"), _description(folder)]), choose
        )
    elif kind == "power":
        _change_power(folder, choose)
    elif kind == "numbers":
        _change_numbers(folder, choose)
    elif choose.random() < 0.2:
        _change_bytes(folder / "config.json", choose)
    elif choose.random() < 0.3:
        take_record(folder / "config.json", choose.choice(WITHOUT))
    else:
        record = json.loads(json.dumps(RECORD))
        section = choose.choice(sorted(record))
        name = choose.choice(sorted(record[section]))
        values = [value for value in _OTHERS if value != record[section][name]]
        if choose.random() < 0.2:
            del record[section][name]
        else:
            record[section][name] = choose.choice(values)
        (folder / "config.json").write_text(json.dumps(record))


def _change_power(folder: Path, choose: random.Random) -> None:
    """Power files of all runs, one of which is missing, cut, stopped at once or changed."""
    write_power(folder)
    path = folder / "power" / f"result_{choose.randrange(10)}" / "node_0.txt"
    how, lines = choose.randrange(4), path.read_text().splitlines(keepends=True)
    if how == 0:
        shutil.rmtree(path.parent)
    elif how == 1:
        path.write_text("".join(lines[: choose.randrange(len(lines))]))
    elif how == 2:
        start = re.search(r'"time_ms": \d+', lines[0])
        assert start
        lines[-1] = re.sub(r'"time_ms": \d+', start[0], lines[-1])
        path.write_text("".join(lines))
    else:
        _change_bytes(path, choose)


def _change_numbers(folder: Path, choose: random.Random) -> None:
    """A number of some logs is none that can be computed with, or all times are divided."""
    factor, value = choose.choice([1, 1, 1.2, 3, 30, 1000]), choose.choice(_NUMBERS)
    key = choose.choice(["eval_accuracy", "train_samples", "global_batch_size"])
    name = choose.choice(["value", "epoch_num", "time_ms"])

    def change(events: list[dict[str, Any]]) -> None:
        for event in events:
            event["time_ms"] = int(1.75e12 + (event["time_ms"] - 1.75e12) / factor)
            if factor == 1 and event["key"] == key:
                (event["metadata"] if name == "epoch_num" else event)[name] = value

    edit(folder, *choose.choice([(3,), (3, 4, 5), ALL]), change=change)


def take_record(path: Path, instead: str | None) -> None:
    path.unlink(missing_ok=True)
    if instead == "folder":
        path.mkdir()
    elif instead == "link":
        path.symlink_to("nowhere")
    elif instead is not None:
        path.write_text(instead)


def _description(folder: Path) -> Path:
    return folder.parents[2] / "systems" / "dgx.json"


def _change_bytes(path: Path, choose: random.Random) -> None:
    """Flips a bit, cuts the end off, or overwrites some bytes."""
    data = bytearray(path.read_bytes())
    at, how = choose.randrange(len(data)), choose.randrange(3)
    if how == 0:
        data[at] ^= 1 << choose.randrange(8)
    elif how == 1:
        del data[at:]
    else:
        data[at : at + 20] = choose.randbytes(20)
    path.write_bytes(data)


def is_of_the_benchmark(folder: Path) -> bool:
    """Whether config.json, read without this project's code, is of BERT-large trained to 0.720 on
    real data.
    """
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return all(
            found[section][name] == value and type(found[section][name]) is type(value)
            for section, values in RECORD.items()
            for name, value in values.items()
            if name != "every_samples"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def judge(folder: Path) -> str:
    """What the commands get wrong about a changed folder, in words; empty if nothing."""
    root = folder.parents[2]
    with contextlib.redirect_stdout(io.StringIO()):  # the official tools print
        stands = answers(root) and official(root)
    stands &= is_of_the_benchmark(folder)
    shown, ranked = _json("show", folder), _json("league", folder)
    compared, checked = _json("compare", folder, folder), _json("check", folder)
    answered = {answer is None for answer in (shown, ranked, compared, checked)}
    if len(answered) > 1:
        return "the commands differ in whether there is a result"
    if shown is None:
        return ""
    page = root.parent / "page.html"
    _json("report", folder, "-o", page)
    said = {
        "show": shown[0]["official"],
        "compare": compared["results"][0]["official"],
        "league": any(one["own"] for one in ranked["results"]),
        "report": "by the official rules" in page.read_text(encoding="utf-8"),
    }
    found = {finding["id"]: finding for finding in checked["checked"][0]["findings"]}
    if "unjudged" in found:
        return found["unjudged"]["message"]
    if len(set(said.values())) > 1:
        return f"the commands disagree: {said}"
    passed = checked["checked"][0]["passed"]
    if said["show"] and not (stands and passed):
        return "official, but not for check or the official tools, or of another model"
    if passed and not stands:
        return "passes, though the official tools reject it, or it is of another model"
    if passed != said["show"] and not UNOFFICIAL & found.keys():
        return "passes, but is not official"
    return ""


def _json(command: str, *words: object) -> Any:
    """What a command prints; None if it refuses the folder. Raises whatever the command raises."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        status = review([command, "--json", *map(str, words)])
    if status == 2:
        lines = [line for line in said.getvalue().splitlines() if "error:" in line]
        assert len(lines) == 1, said.getvalue()
        return None
    return json.loads(printed.getvalue())


def run_one(folder: Path, seed: int, number: int) -> tuple[str, str]:
    """Damages a new folder below ``folder``; returns the kind of damage, and what was got wrong."""
    choose = random.Random(f"{seed} {number}")
    results = write_submission(folder / "EXAMPLE", file=OWN)
    (results / "config.json").write_text(json.dumps(RECORD))
    kind = KINDS[number % len(KINDS)]
    mutate(results, kind, choose)
    try:
        return kind, judge(results)
    except Exception as error:
        return kind, f"stops with {type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--only", type=int, help="number of a single one")
    options = parser.parse_args()
    numbers = range(options.count) if options.only is None else [options.only]
    wrong = Counter[str]()
    for number in numbers:
        with tempfile.TemporaryDirectory() as name:
            kind, problem = run_one(Path(name), options.seed, number)
        if problem:
            wrong[kind] += 1
            print(f"{number} ({kind}): {problem}", flush=True)
    total = (
        f"{sum(wrong.values())} of them wrong"
        if wrong
        else "none accepted, none stops a command, no two disagree"
    )
    print(f"{len(numbers)} mutations, seed {options.seed}: {total}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
