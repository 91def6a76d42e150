"""Splits the sequences of a folder of record files by length, and shuffles each bin into shards of its own.

Bins of 128, 256, 384 and 512 tokens (quarters of the longest sequence allowed, unless --edges says): TARGET/128 holds
the sequences of at most 128 tokens, TARGET/256 those of 129 to 256, and so on, each as part_XXXXX_of_XXXXX.hdf5. A
batch made of a fixed number from each bin has about the same number of tokens on every rank.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bert.data.digests import add_multiset_digests
from bert.data.format import open_records
from bert.data.records import DataError
from bert.data.shards import INDEX
from input_preprocessing.records.deal import check_target, make_shards, plan_deal
from input_preprocessing.records.shuffle import Permute, add_shard_options, source_files
from input_preprocessing.stage.cli import run, stage_parser


def edges_for(max_seq_length: int, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """Most tokens of each bin: those wanted, or quarters of the longest sequence allowed.

    Raises:
        DataError: those wanted leave out sequences, or leave a bin empty.
    """
    if wanted is None:
        return tuple(max_seq_length * quarter // 4 for quarter in (1, 2, 3, 4))
    if not (0, *wanted)[-2] < max_seq_length <= wanted[-1]:
        text = ",".join(map(str, wanted))
        raise DataError(f"--edges {text} does not suit sequences of up to {max_seq_length} tokens; end with that")
    return wanted


def bin_records(
    source: Path,
    target: Path,
    *,
    edges: tuple[int, ...] | None,
    shards: int | None,
    seed: int,
    jobs: int,
    part: tuple[int, int] = (0, 1),
) -> str:
    """Writes the sequences of the files in `source` to a folder a bin; returns their multiset digest.

    Args:
        source: folder of record files.
        target: folder of the bins' folders.
        edges: most tokens of each bin, ascending; None: quarters of the longest sequence allowed.
        shards: of each bin; None: by its size.
        seed: of the shuffle.
        jobs: worker processes.
        part: see `make_shards`.

    Raises:
        DataError: a bin is empty, a sequence is longer than the last edge, or the bins do not hold all sequences.
    """
    files = source_files(source)
    edges = edges_for(open_records(files[0])[1].max_seq_length, edges)
    digests = []
    multiset = ""
    for low, high in zip((0, *edges), edges, strict=False):
        deal, multiset = plan_deal(
            files, target / str(high), stage=f"bin {low} {high}", shards=shards, seed=seed, lengths=(low, high)
        )
        label = f"bin {low + 1}-{high}"
        digests.append(make_shards(deal, Permute(seed), label=label, jobs=jobs, multiset=None, part=part))
    made = add_multiset_digests(digests)
    if part[1] == 1 and made != multiset:
        reason = f"the bins up to {edges[-1]} tokens do not hold exactly the sequences of {source}"
        raise DataError(f"{target}: {reason}; remove it and run again")
    if part[1] == 1:
        _remove_other_bins(target, edges)
    return made


def _remove_other_bins(target: Path, edges: tuple[int, ...]) -> None:
    """Removes the bins of earlier edges, whose sequences are in these as well."""
    for folder in target.iterdir():
        if folder.is_dir() and folder.name.isdigit() and int(folder.name) not in edges:
            check_target(folder)
            for path in folder.iterdir():
                if path.name == INDEX or path.name.lstrip(".").startswith("part_"):
                    path.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()


def parse_edges(text: str) -> tuple[int, ...]:
    """argparse type: '128,256' -> (128, 256), ascending."""
    edges = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if any(high <= low for low, high in zip((0, *edges), edges, strict=False)):
        raise argparse.ArgumentTypeError(f"{text} is not a list of growing lengths, such as 128,256,384,512")
    return edges


def add_edges(parser: argparse.ArgumentParser) -> None:
    """--edges."""
    parser.add_argument(
        "--edges", type=parse_edges, help="most tokens of each bin (default: quarters, 128,256,384,512 for 512)"
    )


def _main(options: argparse.Namespace) -> None:
    bin_records(
        options.source,
        options.target,
        edges=options.edges,
        shards=options.shards,
        seed=options.random_seed,
        jobs=options.jobs,
    )
    bins = sorted((int(folder.name), folder) for folder in options.target.iterdir() if folder.name.isdigit())
    counts = ", ".join(f"{edge}: {len(source_files(folder))}" for edge, folder in bins)
    print(f"{options.target}: shards of each bin {counts}", file=sys.stderr)


def main() -> None:
    """Command line."""
    parser = stage_parser("bins", __doc__)
    add_shard_options(parser)
    add_edges(parser)
    run(parser, _main)
