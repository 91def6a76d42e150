"""The sentence about ranks for which others waited in vain: of the trainer, and of the launcher, which
runs it with the machine's own Python, from 3.6 on.
"""

# Eight names make a line that can be read; a failed switch can take hundreds of ranks.
SHOWN = 8
TIMEOUT_SECONDS = 600  # where DIST_TIMEOUT is not set
CAUSES = "ended, stopped, hung or cut off from the network; raise DIST_TIMEOUT if it is only slow"


def named(ranks: "list[int]", node_of: "dict[int, str]") -> str:
    """The ranks with their nodes."""
    names = [f"rank {rank} on {node_of[rank]}" for rank in ranks[:SHOWN]]
    names += [f"{len(ranks) - SHOWN} more"] if ranks[SHOWN:] else []
    return ", ".join(names)


def missed(who: str, what: str, seconds: "int | str") -> str:
    """What became of them, without the possible causes."""
    return f"{who} did not reach {what}, DIST_TIMEOUT={seconds} s"
