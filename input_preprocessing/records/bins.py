"""Stage `bins`: instances into bins of similar length, each shuffled into shards of its own."""

import argparse
import shutil
from functools import partial
from pathlib import Path

from bert.data import kept_digests
from bert.data.digests import add_multiset_digests
from bert.data.format import open_records
from bert.data.records import DataError
from bert.data.shards import INDEX
from input_preprocessing.records import sharding


def edges_of(max_seq_length: int) -> tuple[int, ...]:
    """Maximal tokens of each bin: quarters of the maximal sequence length."""
    return tuple(max_seq_length * quarter // 4 for quarter in (1, 2, 3, 4))


def bin_records(
    source: Path, target: Path, *, shards: int | None, seed: int, jobs: int
) -> str:
    """Writes the sequences of the files in `source` to one folder per bin; returns their multiset
    digest.

    Args:
        source: folder of record files.
        target: parent of the bins' folders.
        shards: of each bin; None: by its size.
        seed: of the shuffle.
        jobs: worker processes.

    Raises:
        DataError: a bin is empty, or the bins do not hold all sequences.
    """
    files = sharding.verified_files(source, jobs)
    edges = edges_of(open_records(files[0])[1].max_seq_length)
    arrange = partial(sharding.in_random_order, seed)
    digests = []
    for low, high in zip((0, *edges), edges, strict=False):
        plan = sharding.plan_shards(
            files,
            target / str(high),
            stage=f"bin {low} {high}",
            shards=shards,
            seed=seed,
            lengths=(low, high),
        )
        label = f"bin {low + 1}-{high}"
        digests.append(sharding.make_shards(plan, arrange, label=label, jobs=jobs))
    made = add_multiset_digests(digests)
    # Any plan's digest is that of all sequences, of which each bin holds some: compared at the end.
    if made != plan.multiset:
        reason = f"the bins up to {edges[-1]} tokens do not hold exactly the sequences of {source}"
        raise DataError(f"{target}: {reason}; remove it and run again")
    _remove_other_bins(target, edges)
    return made


def _remove_other_bins(target: Path, edges: tuple[int, ...]) -> None:
    """Removes the shards of bins with other edges, of an earlier preparation."""
    for folder in target.iterdir():
        if folder.is_dir() and folder.name.isdigit() and int(folder.name) not in edges:
            sharding.check_target(folder)
            for path in folder.iterdir():
                if path.name == INDEX or path.name.lstrip(".").startswith("part_"):
                    path.unlink()
            # Digests of the shards that are gone.
            shutil.rmtree(folder / kept_digests.FOLDER, ignore_errors=True)
            if not any(folder.iterdir()):
                folder.rmdir()


def main(options: argparse.Namespace) -> None:
    """Splits the sequences of a folder of record files by length, and shuffles each bin into
    separate shards.

    Bins of 128, 256, 384 and 512 tokens (quarters of the maximal sequence length): TARGET/128 has
    the sequences of at most 128 tokens, TARGET/256 those of 129 to 256, and so on, each as
    part_XXXXX_of_XXXXX.hdf5. Batches with a fixed number from each bin have about the same number
    of tokens on every rank.
    """
    sharding.run_stage(options, bin_records)
