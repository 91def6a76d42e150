"""`league --update`: the table of published results from checkouts of the rounds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from review.league.entries import PUBLISHED, Entry, entry_of, read_digest, to_rows
from review.logs.output import ReviewError, csv_text, write_whole
from review.results.score import load_results
from review.rulebook.compliance import BENCHMARK, rulesets

_NAME = re.compile(r"training_results_v(\d+\.\d+)")
_LOG = re.compile(rf"([^/]+/results/[^/]+/{BENCHMARK})/result_[^/]*\.txt", re.IGNORECASE)
_COMMIT = re.compile(r"# round (\S+): (\S+)\n")


def update(folder: Path, table: Path = PUBLISHED) -> dict[str, str]:
    """Rebuilds the rounds whose checkout, training_results_v<round>, lies in the folder; the commits of all rounds.

    The others keep their rows. The table begins with the commit of each round, and follows from these commits and the
    installed rules alone. Raises ReviewError, and then leaves the table as it was.
    """
    checkouts = {name[1]: path for path in sorted(folder.glob("*")) if (name := _NAME.fullmatch(path.name))}
    if not checkouts:
        raise ReviewError(f"{folder}: no training_results_v<round>: clone mlcommons/training_results_v5.0, ... there")
    entries = [entry for entry in read_digest(table) if entry.round not in checkouts]
    commits = dict(_COMMIT.findall(table.read_text(encoding="utf-8")))
    for round_, path in checkouts.items():
        commits[round_], found = _read(path, round_)
        entries += found
    entries.sort(key=lambda entry: (entry.round, entry.folder))
    said = "".join(f"# round {round_}: {commit}\n" for round_, commit in sorted(commits.items()))
    write_whole(table, said + csv_text(to_rows(entries)))
    return dict(sorted(commits.items()))


def _read(checkout: Path, round_: str) -> tuple[str, list[Entry]]:
    """The commit of a checkout, and its results by the rules of their round. Raises ReviewError."""
    if f"{round_}.0" not in rulesets():
        raise ReviewError(f"{checkout}: the installed mlperf_logging has no rules of BERT for round {round_}")

    def git(*words: str) -> str:
        run = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True)
        if run.returncode:
            raise ReviewError(f"{checkout}: {run.stderr.strip().splitlines()[0]}: a git checkout is expected")
        return run.stdout

    if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != checkout.resolve():
        raise ReviewError(f"{checkout}: is within another repository: a git checkout of its own is expected")
    parts = [f":(glob,icase)*/results/*/{BENCHMARK}/**", ":(glob)*/systems/*.json"]
    changed = git("status", "--porcelain", "--untracked-files=all", "--", *parts).splitlines()
    if changed:
        raise ReviewError(f"{checkout}: {changed[0][3:]} and {len(changed) - 1} others differ from its commit")
    logs = [name for name in git("ls-files", "-z", "--", *parts).split("\0") if _LOG.fullmatch(name)]
    absent = [name for name in logs if not (checkout / name).is_file()]
    if absent:
        raise ReviewError(f"{checkout}: {absent[0]} and {len(absent) - 1} others are not checked out")
    folders = sorted({checkout / found[1] for name in logs if (found := _LOG.fullmatch(name))})
    results = [result for folder in folders for result in load_results(folder, f"{round_}.0")]
    return git("rev-parse", "HEAD").strip(), [
        entry_of(result, round_, checkout) for result in results if not result.other_benchmark
    ]
