"""Whether a run that failed is started again, and without which nodes: by the records of an attempt, the
newest checkpoint, and what was tried before. Of the machine's own Python, from 3.6 on.

    restart.py plan 1|0         whether a new start would help: prints the cause, the restarts allowed, and
                                the nodes to leave out, if any can be (1)
    restart.py last             why the attempt ended, by its own word
    restart.py allowed [LIMIT]  exit status 0 if there may be another restart; else prints why not
    restart.py note REASON NODE...       adds a restart to restarts.txt; prints it in words
    restart.py left_out REASON NODE...   adds nodes that a start left out, which is no restart
    restart.py told             prints the run's restarts in words, a line each
    restart.py excluded         the nodes that this job has left out so far
    restart.py continues        exit status 0 if a restart continues the trial
    restart.py resumes          exit status 0 if the user wants a run that hangs or is killed to be resumed

RUN_DIR/restarts.txt has a line for each: job, progress, excluded nodes, time, text.
"""

import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from records import read

RESTARTS = 3  # at most, without a new checkpoint or a finished trial between them
LEFT_OUT = "left out"
ENV = os.environ


class Plan(NamedTuple):
    cause: str
    limit: int = RESTARTS
    nodes: "tuple[str, ...]" = ()


def resumes() -> bool:
    """May a run that hangs, is killed or reaches its time limit be started again?"""
    words = ENV.get("RESUME", "").strip().lower()
    return bool(ENV.get("CHECKPOINT_DIR")) and words in ("1", "true", "yes", "on")


def continues() -> bool:
    """Does it continue the trial? The trainer resumes a checkpoint of the very same run by itself, but in
    pretraining's closed division.
    """
    by_itself = (
        ENV.get("SUBMISSION_DIVISION") == "open" or ENV.get("RANK_MODULE") == "finetune"
    )
    return resumes() or (bool(ENV.get("CHECKPOINT_DIR")) and by_itself)


def plan(can_leave_out: bool) -> "Plan | None":
    """Would a new start help? A lost node is always left out; one that hangs, does not answer or fails a
    test, where the run can go on without it. A rank that was killed from outside is started once more
    where it was. A rank's own error blames no node, although the others report it as missing.
    """
    lost, others, killed = reasons("lost"), {}, reasons("killed")
    if can_leave_out and resumes():
        others = reasons("missing", "unfit")
    if can_leave_out and int(ENV.get("SPARE_NODES") or 0):
        others = reasons("missing", "unfit", "broken")
    # A lost node may have killed the ranks of the others, or have kept them waiting.
    found = lost or others
    nodes = tuple(sorted(found))
    if not nodes:
        again = killed and resumes()
        return Plan(list(killed.values())[-1], limit=1) if again else None
    # All at once are no fault of theirs.
    if len(nodes) > 1 and len(nodes) >= int(ENV["DGXNNODES"]):
        return None
    return Plan(found[nodes[0]], nodes=nodes)


def reasons(*kinds: str) -> "dict[str, str]":
    """The last record of each node of these kinds."""
    records = read(Path(ENV["ATTEMPT_STATUS"]))
    return {record.node: record.reason for record in records if record.kind in kinds}


def folder() -> Path:
    return Path(ENV["LOGDIR"]) / ENV["RUN_NAME"]


def job() -> str:
    """The job, or the supervisor: an earlier one's restarts are not counted."""
    return ENV.get("SLURM_JOB_ID") or ENV.get("SUPERVISOR", "")


def entries() -> "list[list[str]]":
    """The lines of restarts.txt, of all jobs of this run."""
    try:
        lines = (folder() / "restarts.txt").read_text(errors="replace").splitlines()
    except OSError:
        return []
    fields = [line.split("\t") for line in lines]
    # A line that was cut off, on a full disk or by a power loss, is none.
    return [words for words in fields if len(words) == 5]


def own() -> "list[list[str]]":
    """Those of this job."""
    return [words for words in entries() if words[0] == job()]


def trial() -> int:
    """The trial that ran last, by its output; 0 before any."""
    outputs = [
        path for path in folder().glob("output_*.txt") if path.stem[7:].isdigit()
    ]
    # By time: trials that an earlier job has finished are skipped.
    newest = max(outputs, key=lambda path: path.stat().st_mtime, default=None)
    return int(newest.stem[7:]) if newest else 0


def checkpoints(number: int) -> Path:
    """The folder of a trial's checkpoints, as its trainer chooses it."""
    saved = Path(ENV["CHECKPOINT_DIR"])
    if ENV.get("RANK_MODULE") != "finetune":
        return saved / f"trial_{number}" if number else saved
    listed = re.findall(r"\d+", ENV.get("SEEDS", ""))[number:]
    seed = int(listed[0]) if listed else int(ENV.get("SEED") or 1) + number
    return saved / f"seed_{seed}"


def checkpoint() -> int:
    """Step of the newest checkpoint of the trial that ran last; 0 if there is none."""
    if not continues():
        return 0
    # One file, or a folder whose index is written last.
    saved = checkpoints(trial())
    paths = [*saved.glob("step_*.pt"), *saved.glob("*step*/index.pt")]
    names = [path.parent.name if path.stem == "index" else path.stem for path in paths]
    steps = [re.fullmatch(r"(?:global_step|step_)(\d+)", name) for name in names]
    return max((int(step.group(1)) for step in steps if step), default=0)


def progress() -> str:
    """How far the run has come: restarts without progress are counted."""
    done = [*folder().glob("result_*.txt"), *folder().glob("model_*/figures.json")]
    return f"{len(done)} trials, step {checkpoint()}"


def allowed(limit: int = RESTARTS) -> str:
    """Why there may be no other restart; empty if there may."""
    # Leaving nodes out before the first attempt is no restart.
    now = progress()
    recent = [words[1] for words in own() if words[1] != LEFT_OUT][-limit:]
    if recent.count(now) < limit:
        return ""
    restarts = f"{limit} restart{'s' * (limit > 1)}"
    return f"gave up: {restarts} brought no new checkpoint after step {now.split()[-1]}"


def write(state: str, text: str, nodes: "list[str]") -> None:
    folder().mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    with open(str(folder() / "restarts.txt"), "a") as file:
        file.write("\t".join((job(), state, " ".join(nodes), now, text)) + "\n")


def reached(number: int) -> int:
    """The step to which the trial's ranks came."""
    # A trial's files are moved to the run's folder when it ends.
    name, steps = f"step_{number}.txt", [0]
    for path in (folder() / name, *folder().glob("running_*/" + name)):
        with suppress(OSError, ValueError):
            steps += map(int, path.read_text().split())
    return max(steps)


def note(reason: str, nodes: "list[str]") -> str:
    text = f"without {' '.join(nodes)}: {reason}" if nodes else reason
    if not continues():
        text += "; the trial is repeated"
    else:
        step = checkpoint()
        text += f"; continues from step {step}"
        repeated = reached(trial()) - step
        text += f", repeating about {repeated} steps" if repeated > 0 else ""
    write(progress(), text, nodes)
    return text


def main(command: str, *words: str) -> int:
    if command == "plan":
        found = plan(words[0] == "1")
        for word in (found.cause, found.limit, *found.nodes) if found else ():
            print(word)
    elif command == "last":
        print(*reasons("last").values())
    elif command == "allowed":
        refusal = allowed(*map(int, words))
        print(refusal, end="")
        return bool(refusal)
    elif command == "note":
        print(note(words[0], list(words[1:])))
    elif command == "left_out":
        write(LEFT_OUT, words[0], list(words[1:]))
    elif command == "told":
        for _, state, _, when, text in entries():
            if state != LEFT_OUT:
                print(f"run: restarted at {when}, {text}")
    elif command == "excluded":
        nodes = " ".join(words[2] for words in own())
        for node in sorted(set(nodes.split())):
            print(node)
    else:
        return not {"continues": continues, "resumes": resumes}[command]()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
