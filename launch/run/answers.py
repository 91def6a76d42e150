"""Why a command did not run on every node, from the output of all nodes (stdin), where each on which it
succeeded says "answer NODE". Of the machine's own Python, from 3.6 on.

    answers.py missing NODES            those of these nodes that did not answer while others did, a line each
    answers.py why NODES [PATTERN...]   the reason in one line, of those nodes, if they are known
    answers.py reason NODES             the reason alone

Of a line that has a PATTERN, its first group is the reason, or what follows => in the pattern.
"""

import os
import re
import sys

SRUN = "srun: error: "
RESULT = "Exited with exit|Terminated$"


def reason(text: str, *patterns: str) -> str:
    """The line that explains best: a pattern's, the program's own, or srun's."""
    # Successes explain nothing.
    lines = [line for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("answer ")]
    for pattern in patterns:
        wanted, _, says = pattern.partition("=>")
        for line in lines:
            found = re.search(wanted, line)
            if found:
                return says or found.group(1)
    # A program knows more than the launcher that reports its exit status.
    own = [line for line in lines if not re.match("srun: |slurmstepd: ", line)]
    told = [line for line in lines if re.match(f"{SRUN}(?!.*({RESULT}))", line)]
    best = (own or told or lines or ["no output"])[-1]
    return re.sub(f"^{SRUN}", "", best)


def main(command: str, nodes: str, *patterns: str) -> None:
    text = sys.stdin.read()
    answered = re.findall(r"^answer (.+)", text, re.MULTILINE)
    # Where nobody answered, the fault is no single node's.
    missing = [node for node in nodes.split() if answered and node not in answered]
    if command == "missing":
        print(*missing, sep="\n")
        return
    why = reason(text, *patterns)
    if not missing and os.environ["DGXNNODES"] != "1":
        # Without an answer, srun may have named the task's node.
        told = re.findall(rf"^{SRUN}([^ :]+): tasks? ", text, re.MULTILINE)
        missing = sorted(set(told))
    if command == "why" and missing and missing[0] not in why:
        why = f"{' '.join(missing)}: {why}"
    print(why)


if __name__ == "__main__":
    main(*sys.argv[1:])
