"""Makes published.csv from checkouts of MLCommons' result repositories; the same commits make the
same bytes.

usage: python -m tests.review.league.remake FOLDER >review/league/published.csv

FOLDER holds checkouts of github.com/mlcommons/training_results_v0.7 to _v5.0, of which the folders
results/*/bert and systems are needed. Each result is judged by the rules of its round. The first
lines name the commits, and the folders with logs that a checkout lacks.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from common.process import status_of
from review.league.entries import HYPERPARAMETERS, Entry, entry_of
from review.logs import tree
from review.logs.mllog import number
from review.logs.output import ERROR, ReviewError, csv_text
from review.results.score import load_results
from review.verdict.checking import Verdict
from review.verdict.official_rules import check_together

_CHECKOUT = re.compile(r"training_results_v(\d+\.\d+)")
_LOG = re.compile(r"([^/]+/results/[^/]+/bert)/result_[^/]*\.txt", re.IGNORECASE)
_DECIMALS = {"minutes": 4, "published_minutes": 4, "samples": 0, "joules": 2}
_DECIMALS |= {"sequences_per_second": 1, "training_rate": 1}
_LEFT_OUT = ("hyperparameters", "folder", "obstacles", "unproved")
COLUMNS = [field.name for field in fields(Entry) if field.name not in _LEFT_OUT]


def remade(folder: Path) -> str:
    checkouts = {
        name[1]: path
        for path in sorted(folder.glob("*"))
        if (name := _CHECKOUT.fullmatch(path.name))
    }
    if not checkouts:
        what = "clone mlcommons/training_results_v5.0, ... there"
        raise ReviewError(f"{folder}: no training_results_v<round>: {what}")
    about: list[str] = []
    rows: list[list[str]] = []
    for round_, checkout in checkouts.items():
        git = ["git", "-C", str(checkout)]
        failure = f"{checkout}: a git checkout is expected"
        commit = tree.run([*git, "rev-parse", "HEAD"], failure).decode().strip()
        listed = tree.run([*git, "ls-tree", "-r", "-z", "--name-only", "HEAD"], failure)
        names = listed.decode("utf-8", "replace").split("\0")
        logs = {name: found[1] for name in names if (found := _LOG.fullmatch(name))}
        lacks = [name for name in logs if not (checkout / name).is_file()]
        about.append(f"# round {round_}: {commit}\n")
        for place in dict.fromkeys(logs[name] for name in lacks):
            count = sum(logs[name] == place for name in lacks)
            about.append(f"# round {round_} lacks {count} logs of {place}\n")
        held = sorted({place for name, place in logs.items() if name not in lacks})
        for place in held:
            rows += _rows(checkout, place, round_)
    return "".join(about) + csv_text([[*COLUMNS, *HYPERPARAMETERS, "folder"], *rows])


def _rows(checkout: Path, place: str, round_: str) -> Iterator[list[str]]:
    for result in load_results(checkout / place, f"{round_}.0"):
        if result.other_benchmark:
            continue
        errors = [one for one in check_together(result) if one.severity == ERROR]
        accepted = result.score is not None and not errors
        verdict = Verdict(
            path=result.folder, title="", result=result, official=accepted
        )
        entry = entry_of(verdict, round_, checkout)
        mean = result.raw if result.score is None else result.olympic
        scaling = tree.read_json(result.folder / "scaling.json")
        # With the factor that was committed with the logs.
        factor = number(scaling.get("scaling_factor"))
        minutes = mean.minutes and mean.minutes * (1.0 if factor is None else factor)
        cells = {**vars(entry), "published_minutes": minutes}
        known = [entry.hyperparameters.get(key) for key in HYPERPARAMETERS]
        settings = ("" if value is None else f"{value:.10g}" for value in known)
        yield [*(_cell(name, cells[name]) for name in COLUMNS), *settings, entry.folder]


def _cell(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:.{_DECIMALS[name]}f}" if name in _DECIMALS else f"{value:.12g}"
    return "" if value is None else str(value)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        sys.stdout.write(remade(Path(sys.argv[1])))
    except ReviewError as error:
        print(f"remake: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))
