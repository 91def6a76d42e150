"""What Slurm says about this job: its nodes, the lost ones, why it ends. Of the machine's own Python, from 3.6 on.

    job.py SECONDS JOB nodes             the nodes that it still has, a line each
    job.py SECONDS JOB lost NODE...      a record of each of these that Slurm has taken, even if it is back,
                                         or that does not respond
    job.py SECONDS JOB aborted NODE...   the same of each that srun gave up, by its output (stdin)
    job.py SECONDS JOB why SIGNAL NODE...    why it ends, in words, if a script got this signal
    job.py SECONDS JOB cause SIGNAL NODE...  the same; nothing if Slurm knows no reason
    job.py SECONDS JOB left              seconds until its time limit; 0 if that is unknown
    job.py SECONDS JOB dead              of names on stdin that end in bert_JOB_RESTART, or of a further attempt
                                         bert_JOB_RESTART_ATTEMPT, those whose job or attempt has ended
    job.py SECONDS JOB orphaned NODE     the node of its script, if Slurm lost that and NODE is the first that is left

SECONDS is how long the controller may take.
"""

import os
import re
import subprocess
import sys
import time

# srun's own words for a node on which its processes are gone, or did not start: then comes the node's name, or
# its place in the step. The same in Slurm 18.08 to 26.05, but for "Task launch", which is newer.
GAVE_UP = (
    "[Aa]borting,.* node|Cannot communicate with node|Node failure on"
    "|Task launch for .* failed on node"
)

STARTED = "SLURM_RESTART_COUNT", "ATTEMPT"  # how often: the job, and a run in it
COMMON = {
    "CANCELLED": "the job was cancelled",
    "PREEMPTED": "the job was preempted",
    "NODE_FAIL": "a node of the job failed",
    "COMPLETING": "the job was cancelled or ended by Slurm",
}


def ask(seconds: str, *words: str) -> str:
    """Output of a command of Slurm; empty if it does not answer in time."""
    # A controller that is busy or gone keeps its clients waiting for minutes.
    command = ["timeout", "--signal=KILL", seconds, *words]
    quiet = subprocess.DEVNULL
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=quiet, stdin=quiet)
    return "" if done.returncode else done.stdout.decode(errors="replace")


def aborted(output: str, nodes: "list[str]") -> "list[str]":
    """Nodes of a step that srun gave up. It alone knows of one that came back so soon that the controller
    did not miss it, and it kills the other ranks before they say whom they miss.
    """
    places = {str(place): node for place, node in enumerate(nodes)}
    line = rf"^srun: error: .*?(?:{GAVE_UP}) (\d+\b|[^\s:]+)"
    said = re.findall(line, output, re.MULTILINE)
    return sorted({places.get(word, word) for word in said}.intersection(nodes))


class Job:
    # Asked once: the answers to one question must be of one moment.
    def __init__(self, seconds: str, job: str) -> None:
        self.shown = ask(seconds, "scontrol", "--oneliner", "show", "job", job)

    def field(self, name: str) -> str:
        """Empty for (null), as the nodes are once the job is requeued."""
        found = re.findall(rf" {name}=([^ (\n]*)", " " + self.shown)
        return found[-1] if found else ""

    def nodes(self, otherwise: str = "") -> "list[str]":
        listed = self.field("NodeList") or otherwise
        return ask("9", "scontrol", "show", "hostnames", listed).split()

    def lost(self, nodes: "list[str]") -> "list[str]":
        # A node that was restarted is up again, but its processes are gone: the job has lost it.
        left = self.nodes(os.environ["SLURM_JOB_NODELIST"])
        options = ["--noheader", "--Node", "--format=%N %T"]
        states = ask("5", "sinfo", *options, f"--nodes={','.join(nodes)}")
        # A star after the state: the node does not respond.
        down = re.findall(r"^(\S+) (?:down|.*[*]$)", states, re.MULTILINE)
        return sorted(node for node in nodes if node not in left or node in down)

    def cause(self, signal: str, nodes: "list[str]") -> str:
        state, limit = self.field("JobState"), self.field("TimeLimit")
        lost = " ".join(self.lost(nodes))
        lost = f" ({lost}: down or not responding)" if lost else ""
        again = int(self.field("Restarts") or 0)
        ended = state == "TIMEOUT" or self.field("Reason") == "TimeLimit"
        # run.sub asks for USR1 before the time limit (--signal), and nobody else sends it.
        if signal == "USR1" or ended:
            limit = f" of {limit}" if limit else ""
            return f"the job reached its time limit{limit}"
        # By the count, since a requeued job may already be pending, or running elsewhere.
        started = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        if again > started or state.startswith("REQUEUE") or state == "PENDING":
            return f"the job was requeued{lost}"
        return COMMON.get(state, "") + (lost if state == "NODE_FAIL" else "")

    def left(self) -> int:
        """Slurm's times are by the controller's clock, from which this node's may be hours off."""
        names, shape = ("StartTime", "EndTime"), "%Y-%m-%dT%H:%M:%S"
        try:
            start, end = (time.strptime(self.field(name), shape) for name in names)
        except ValueError:
            return 0
        # By both: how long this script has run on its own clock, and the end on the controller's.
        now, began = time.time(), float(os.environ["SUPERVISOR_BEGAN"])
        own = time.mktime(end) - time.mktime(start) - (now - began)
        theirs = time.mktime(end) - now
        return int(min(own, theirs) if theirs > 0 else own)


def dead(seconds: str, job: str, names: "list[str]") -> "list[str]":
    """Without an answer from Slurm, none."""
    # After the names were listed, so that no job can have started in between.
    known = ask(seconds, "squeue", "--noheader", "--format=%A").split()
    now = [int(os.environ.get(name) or 0) for name in STARTED]
    found = []
    for name in names if known else ():
        words = re.search(r"(?:^|[_/])bert_(\d+)_(\d+)(?:_(\d+))?$", name)
        if not words:
            continue
        number, *counts = words.groups("0")
        start = [int(count) for count in counts]
        over = start < now if number == job else number not in known
        if over:
            found.append(name)
    return found


def main(seconds: str, job: str, command: str, *words: str) -> None:
    if command == "dead":
        for name in dead(seconds, job, sys.stdin.read().splitlines()):
            print(name)
        return
    if command == "aborted":
        output = sys.stdin.buffer.read().decode(errors="replace")
        for node in aborted(output, list(words)):
            print("lost", "-", node, "-", "lost by srun", sep="\t")
        return
    now, nodes = Job(seconds, job), list(words[1:])
    if command == "nodes":
        print(*now.nodes(os.environ["SLURM_JOB_NODELIST"]), sep="\n")
    elif command == "lost":
        for node in now.lost(list(words)):
            print("lost", "-", node, "-", "lost by Slurm", sep="\t")
    elif command == "left":
        print(now.left())
    elif command == "orphaned":
        # Each node asks: one of them must act, and all see the same order.
        script, left = now.field("BatchHost"), now.nodes()
        if script and left and script not in left and left[0] == words[0]:
            print(script)
    else:
        cause = now.cause(words[0], nodes)
        if command == "why":
            # What Slurm does not say is not made up.
            silent = "" if now.shown else " (Slurm's controller did not say why)"
            cause = cause or f"interrupted by SIG{words[0]}{silent}"
        print(cause)


if __name__ == "__main__":
    main(*sys.argv[1:])
