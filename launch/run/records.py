"""Records: how ranks, steps and attempts report. Of the machine's own Python, from 3.6 on, or the image's.

A record is one line of five fields, separated by tabs: kind, rank, node, step, reason; "-" where
there is none.

    bad_input, not_reached, failed   a rank ended with exit status 2, 3, another
    hung                             a rank ended because others did not reach a collective (status 4)
    killed                           a rank was killed from outside (SIGKILL)
    crashed, ended                   by another signal; by one that launchers send when another rank has failed
    missing                          a rank did not reach a collective, as the others say
    unfit                            the start test names this node
    broken                           a step did not run on this node, and did on others
    lost                             Slurm has lost this node
    last                             why the attempt ends, for the last line of the run

The first rank that ends badly leaves RUN_DIR/status, one record; an attempt appends to
ATTEMPT_STATUS, which the supervisor reads.

    records.py explain FOLDER TRIAL STATUS RANK NODE   leaves there what became of a rank, by its exit status
    records.py relay FOLDER TRIAL FILE                 leaves the one of a file there
"""

import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CAUSES = ("killed", "crashed")  # of what the other ranks report: broken connections
EFFECTS = ("hung", "ended")  # of another rank's failure


KINDS = {2: "bad_input", 3: "not_reached", 4: "hung", 137: "killed"}
ENDED = (129, 130, 143)  # most likely by the launcher, because another rank failed


class Record(NamedTuple):
    kind: str
    rank: str
    node: str
    step: str
    reason: str

    def line(self) -> str:
        words = (" ".join(field.replace("\t", " ").splitlines()) for field in self)
        return "\t".join(word or "-" for word in words) + "\n"


def read(path: Path) -> "list[Record]":
    """The records of a file. A line that is cut off is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    fields = [line.split("\t") for line in text.split("\n")]
    return [Record(*words) for words in fields if len(words) == 5 and all(words)]


def first(folder: Path) -> "Record | None":
    """The record that ranks have left in a folder."""
    return next(iter(read(folder / "status")), None)


def leave(folder: Path, record: Record) -> None:
    """Leaves the record of a rank in a folder that nodes share. Causes replace what other ranks report
    because of them. Whole: written beside, then linked, which fails if there is one.
    """
    beside, file, there = (
        folder / f".status_{record.rank}",
        folder / "status",
        first(folder),
    )
    beside.write_text(record.line())
    replaced = (
        there is not None and there.kind in EFFECTS and record.kind not in EFFECTS
    )
    if record.kind in CAUSES or replaced:
        os.replace(str(beside), str(file))
        return
    with suppress(OSError):  # another rank was first
        os.link(str(beside), str(file))
    beside.unlink()


def used_up() -> bool:
    """Has the kernel killed a process of this Slurm step for want of memory?"""
    # A login's cgroup may have had its kills long before.
    if "SLURM_STEP_ID" not in os.environ:
        return False
    groups = Path(os.environ.get("PROC_CGROUP", "/proc/self/cgroup"))
    root = Path(os.environ.get("SYSFS", "/sys")) / "fs/cgroup"
    with suppress(OSError):
        # A line of version 2 of cgroups names no kind.
        shape = re.compile(r"^\d+:(memory|):/(.*)", re.MULTILINE)
        for kind, group in shape.findall(groups.read_text())[:1]:
            file = "memory.oom_control" if kind else "memory.events"
            counts = (root / kind / group / file).read_text()
            return bool(re.search("^oom_kill [1-9]", counts, re.MULTILINE))
    return False


def of_rank(folder: Path, trial: str, status: int, rank: str, node: str) -> Record:
    other = "ended" if status in ENDED else "crashed" if status > 128 else "failed"
    kind = KINDS.get(status, other)
    # PyTorch aborts a rank whose NCCL collective timed out, and has it dump its collectives before.
    if status == 134 and (folder / f"nccl_{trial}_rank_{rank}").exists():
        kind = "hung"
    # The shell reports a signal as 128 and its number.
    how = f"ended with exit status {status}, see output_{trial}.txt"
    names = {number.value + 128: number.name for number in signal.Signals}
    if status in names:
        how = f"was killed by {names[status]}"
    if kind == "killed" and used_up():
        how += ": the memory of its Slurm step was used up (sbatch --mem)"
    try:
        step = (folder / f"step_{trial}.txt").read_text().partition("\n")[0]
    except OSError:
        step = ""
    return Record(kind, rank, node, step, f"rank {rank} on {node} {how}")


def explain(folder: Path, trial: str, record: Record) -> None:
    """The same, with the reason that the rank's trainer has left, if it has."""
    error = folder / f"error_{trial}.txt"
    # What the others said of the connection that broke with it.
    if record.kind in CAUSES and error.exists():
        error.unlink()
    # "x": the trainer, or an earlier rank, knows more.
    try:
        with open(str(error), "x") as file:
            file.write(record.reason + "\n")
    except OSError:
        pass
    reasons = error.read_text(errors="replace").splitlines()
    leave(folder, record._replace(reason=reasons[0] if reasons else ""))


def main(command: str, folder: str, trial: str, *words: str) -> None:
    if command == "relay":
        found = read(Path(words[0]))[:1]
    else:
        found = [of_rank(Path(folder), trial, int(words[0]), *words[1:])]
    for record in found:
        explain(Path(folder), trial, record)


if __name__ == "__main__":
    main(*sys.argv[1:])
