"""The machines of a hostfile in DeepSpeed's format, "node1 slots=8", rank 0's first. Of the machine's own Python, from
3.6 on. Usage: hosts.py FILE [NODES GPUS], the first NODES machines, each of which must have that many GPUs.
"""

import re
import sys

# A name that begins with - would be an option of ssh.
LINE = re.compile(r"\s*([^\s-]\S*)\s+slots=(\d+)\s*(#.*)?")
NOTHING = re.compile(r"\s*(#.*)?")


def machines(lines: "list[str]") -> "dict[str, int]":
    """Their GPUs."""
    found = {}
    for number, line in enumerate(lines, start=1):
        if NOTHING.fullmatch(line):
            continue
        words = LINE.fullmatch(line)
        if not words:
            expected = "expected a machine and its GPUs: node1 slots=8"
            raise ValueError(f", line {number}: '{line}': {expected}")
        if words.group(1) in found:
            raise ValueError(f", line {number}: {words.group(1)} is listed twice")
        found[words.group(1)] = int(words.group(2))
    if not found:
        raise ValueError(": no machine in it; expected lines such as node1 slots=8")
    return found


def main(file: str, nodes: str = "", gpus: str = "") -> None:
    with open(file, encoding="utf-8") as opened:
        found = machines(opened.read().splitlines())
    if nodes and len(found) < int(nodes):
        wanted = f"the config wants DGXNNODES={nodes}: add some, or lower it"
        raise ValueError(f": {len(found)} machines and {wanted}")
    chosen = list(found)[: int(nodes or len(found))]
    for host in chosen:
        if gpus and found[host] != int(gpus):
            both = f"{host} slots={found[host]} and DGXNGPU={gpus}"
            raise ValueError(f": {both}: they must be equal")
    print(*chosen, sep="\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError:
        sys.exit(": not a readable file; it needs one line per machine")
    except ValueError as problem:
        sys.exit(str(problem))
