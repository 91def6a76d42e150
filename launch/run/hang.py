"""The ranks that did not reach a collective. Usage: hang.py COMMAND FOLDER TRIAL RANKS NODE...

    reason    after a timeout of NCCL: prints them in one line, and lists them in hang_TRIAL.txt.
              Every rank that lives has dumped its collectives then (run_and_time.sh); those that are
              gone, stopped or cut off have not. Prints nothing where the trainer has listed them.
    records   prints a record of each (run/record.sh)

FOLDER is the trial's, RANKS how many a node has, and the nodes are in the order of the ranks.
"""

import os
import re
import sys
from pathlib import Path

from common.missing import CAUSES, TIMEOUT_SECONDS, missed, named

SECONDS = os.environ.get("DIST_TIMEOUT") or TIMEOUT_SECONDS


def reason(folder: Path, trial: str, node_of: "dict[int, str]") -> None:
    dump, listed = f"nccl_{trial}_rank_", folder / f"hang_{trial}.txt"
    alive = {path.name[len(dump) :] for path in folder.glob(dump + "*")}
    if listed.exists() or not alive:
        return
    absent = [rank for rank in node_of if str(rank) not in alive]
    who = named(absent, node_of) or f"a rank that lives, see {dump}*,"
    try:
        lines = ["did not reach a collective:", *(f"rank {rank}" for rank in absent)]
        listed.write_text("\n".join(lines) + "\n")
    except OSError:  # the disk may be full
        pass
    print(f"{missed(who, 'a collective', SECONDS)}: {CAUSES}")


def records(folder: Path, trial: str, node_of: "dict[int, str]") -> None:
    try:
        text = (folder / f"hang_{trial}.txt").read_text()
    except OSError:
        return
    for rank in map(int, re.findall(r"^rank (\d+)$", text, re.MULTILINE)):
        if rank in node_of:
            said = missed(named([rank], node_of), "a collective", SECONDS)
            print("missing", rank, node_of[rank], "-", said, sep="\t")


def main(command: str, folder: str, trial: str, ranks: str, *nodes: str) -> None:
    node_of = dict(enumerate(node for node in nodes for _ in range(int(ranks))))
    tell = reason if command == "reason" else records
    tell(Path(folder), trial, node_of)


if __name__ == "__main__":
    main(*sys.argv[1:])
