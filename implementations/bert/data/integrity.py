"""Record files are compared by their content, not by what they say of themselves."""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bert.core.dist import World
from bert.data.kept_digests import digest_of, identity_of
from bert.data.records import DataError

_THREADS = 4  # BLAKE2b runs beside Python


def check(
    recorded: Mapping[Path, str], world: World, spare: Path | None = None
) -> None:
    """Compares the content of files with the digests recorded of them (Shards.recorded_digests).

    Files without a digest, as of other makers, are compared between ranks that see copies of them;
    where all see the same ones there is nothing to compare them with. spare: see digest_of.

    Raises DataError, on every rank, naming the rank and the first file that differs. A collective.
    """
    # Ranks that see the same inodes see the same files: each reads its share of them.
    group = world.peers([identity_of(path) for path in recorded])
    mine = list(enumerate(recorded.items()))[group.index(world.rank) :: len(group)]
    has_copies = len(group) < world.size

    def look(item: tuple[int, tuple[Path, str]]) -> tuple[int, str, str]:
        """The file's number, its digest if it records none, and what is wrong with it."""
        number, (path, known) = item
        try:
            computed = digest_of(path, spare) if known or has_copies else ""
        except DataError as error:
            return number, "", str(error)
        if not known or computed == known:
            return number, "" if known else computed, ""
        return (
            number,
            "",
            f"{path} was changed after it was written (digest {computed}, recorded {known}): copy or prepare it again",
        )

    with ThreadPoolExecutor(_THREADS) as executor:
        looked = list(executor.map(look, mine))
    problem = next((problem for *_, problem in looked if problem), "")
    digests = {number: digest for number, digest, _ in looked if digest}
    reports = world.objects((problem, platform.node(), digests))
    for rank, (problem, node, _) in enumerate(reports):
        if problem:
            raise DataError(
                f"rank {rank} on {node}: {problem}" if world.size > 1 else problem
            )
    for number, path in enumerate(recorded):
        if differs := _difference([digests.get(number, "") for *_, digests in reports]):
            rank, other = differs
            raise DataError(
                f"rank {rank} on {reports[rank][1]}: {path} has other contents than that of rank {other}; copy it again"
            )


def _difference(digests: Sequence[str]) -> tuple[int, int] | None:
    """A rank whose digest is not that of most, and one of those; "" of a rank that did not look."""
    if not (counted := Counter(filter(None, digests)).most_common()):
        return None
    usual = counted[0][0]
    odd = (rank for rank, digest in enumerate(digests) if digest not in ("", usual))
    return next(((rank, digests.index(usual)) for rank in odd), None)
