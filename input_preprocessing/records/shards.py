"""The stages that make training files of instances, shuffled, packed or binned, and the evaluation set."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bert.data.digests import add_multiset_digests
from bert.data.format import open_records, write_records
from bert.data.packing import pack
from bert.data.records import DataError, Records
from bert.data.shards import INDEX
from input_preprocessing.records.deal import Integers, check_target, make_shards, plan_deal, random_order
from input_preprocessing.stage.cli import add_jobs, check_not_source, positive

NUM_EVAL_SAMPLES = 10_000


def source_files(folder: Path) -> list[Path]:
    """The record files of a folder, by name.

    Raises:
        DataError: there are none.
    """
    files = sorted(path for path in folder.glob("*.hdf5") if not path.name.startswith("."))
    if not files:
        raise DataError(f"no .hdf5 files in {folder}; check the path or run the stage before")
    return files


def _shuffled(seed: int, records: Records, group: int) -> tuple[Integers, None]:
    """A random order of a group's sequences."""
    return random_order(records.num_sequences, seed, group, use=0), None


def _packed(seed: int, max_tokens: int, max_sequences: int, records: Records, group: int) -> tuple[Integers, Integers]:
    """Rows of a group's sequences in random order, each made of random sequences of the lengths it wants."""
    mixed = random_order(records.num_sequences, seed, group, use=0)
    order, row_offsets = pack(records.sequence_lengths[mixed], max_tokens, max_sequences)
    rows = random_order(len(row_offsets) - 1, seed, group, use=1)
    sizes = np.diff(row_offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    where = np.repeat(row_offsets[rows] - offsets[:-1], sizes) + np.arange(offsets[-1])
    return mixed[order[where]], offsets


def shuffle_records(
    source: Path, target: Path, *, shards: int | None, seed: int, jobs: int, part: tuple[int, int] = (0, 1)
) -> str:
    """Writes the sequences of the files in `source`, shuffled, as shards to `target`; returns their multiset digest."""
    deal, multiset = plan_deal(source_files(source), target, stage="shuffle", shards=shards, seed=seed)
    return make_shards(deal, partial(_shuffled, seed), label="shuffle", jobs=jobs, multiset=multiset, part=part)


def pack_records(
    source: Path, target: Path, *, shards: int | None, seed: int, max_sequences_per_row: int, jobs: int,
    part: tuple[int, int] = (0, 1),
) -> str:  # fmt: skip
    """Writes the sequences of the files in `source`, packed, as shards to `target`; returns their multiset digest."""
    stage = f"pack {max_sequences_per_row}"
    deal, multiset = plan_deal(source_files(source), target, stage=stage, shards=shards, seed=seed)
    arrange = partial(_packed, seed, deal.metadata.max_seq_length, max_sequences_per_row)
    return make_shards(deal, arrange, label="pack", jobs=jobs, multiset=multiset, part=part)


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
    source: Path, target: Path, *, edges: tuple[int, ...] | None, shards: int | None, seed: int, jobs: int,
    part: tuple[int, int] = (0, 1),
) -> str:  # fmt: skip
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
    digests, multiset = [], ""
    for low, high in zip((0, *edges), edges, strict=False):
        stage, folder = f"bin {low} {high}", target / str(high)
        deal, multiset = plan_deal(files, folder, stage=stage, shards=shards, seed=seed, lengths=(low, high))
        arrange, label = partial(_shuffled, seed), f"bin {low + 1}-{high}"
        digests.append(make_shards(deal, arrange, label=label, jobs=jobs, multiset=None, part=part))
    made = add_multiset_digests(digests)
    if part[1] > 1:
        return made
    if made != multiset:
        reason = f"the bins up to {edges[-1]} tokens do not hold exactly the sequences of {source}"
        raise DataError(f"{target}: {reason}; remove it and run again")
    for folder in target.iterdir():  # the bins of earlier edges, whose sequences are in these as well
        if folder.is_dir() and folder.name.isdigit() and int(folder.name) not in edges:
            check_target(folder)
            for path in folder.iterdir():
                if path.name == INDEX or path.name.lstrip(".").startswith("part_"):
                    path.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()
    return made


def pick_samples(source: Path, target: Path, num_samples: int = NUM_EVAL_SAMPLES) -> int:
    """Writes the picked sequences, all n where n is below num_samples; tells and returns how many.

    Raises:
        DataError: unreadable or empty source, or unwritable target.
    """
    records, metadata = open_records(source)
    count = records.num_sequences
    if not count:
        raise DataError(f"{source} has no sequences to evaluate on; check the evaluation text")
    chosen = range(count) if count <= num_samples else [int(i * (count / num_samples)) for i in range(num_samples)]
    origin = (*metadata.source, (f"evalset {num_samples}", metadata.content_digest))
    write_records(target, records.select(chosen), dataclasses.replace(metadata, source=origin))
    short = f" (all there are; {num_samples:,} were asked for)" if count < num_samples else ""
    print(f"{target}: {len(chosen):,} evaluation samples{short}", file=sys.stderr)
    return len(chosen)


def parse_edges(text: str) -> tuple[int, ...]:
    """argparse type: '128,256' -> (128, 256), ascending."""
    edges = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if any(high <= low for low, high in zip((0, *edges), edges, strict=False)):
        raise argparse.ArgumentTypeError(f"{text} is not a list of growing lengths, such as 128,256,384,512")
    return edges


def add_edges(parser: argparse.ArgumentParser) -> None:
    told = "most tokens of each bin (default: quarters, 128,256,384,512 for 512)"
    parser.add_argument("--edges", type=parse_edges, help=told)


def _run(parser: argparse.ArgumentParser, make: Callable[..., str]) -> Path:
    """Calls `make` with the options that the stages share and those of `parser`; the folder of the shards."""
    parser.add_argument("--source", type=Path, required=True, help="folder of record files, as `instances` makes them")
    parser.add_argument("--target", type=Path, required=True, help="folder for part_XXXXX_of_XXXXX.hdf5")
    told = "number of shards (default: one per 500 sequences, at most 4320)"
    parser.add_argument("--shards", type=positive, help=told)
    parser.add_argument("--random-seed", type=int, default=12345, dest="seed", help="(default %(default)s)")
    add_jobs(parser)
    options = vars(parser.parse_args())
    make(**options)
    return options["target"]


def _count(target: Path) -> None:
    print(f"{target}: {len(source_files(target))} shards", file=sys.stderr)


def shuffle_main(parser: argparse.ArgumentParser) -> None:
    """Shuffles the sequences of a folder of record files into shards, over all of them, seeded, in bounded memory."""
    _count(_run(parser, shuffle_records))


def pack_main(parser: argparse.ArgumentParser) -> None:
    """Packs the sequences of a folder of record files into rows, and the rows, in random order, into shards.

    Each row holds at most --max-sequences-per-row sequences and as many tokens as the longest sequence allowed.
    """
    parser.add_argument("--max-sequences-per-row", type=positive, default=3, help="(default %(default)s)")
    _count(_run(parser, pack_records))


def bins_main(parser: argparse.ArgumentParser) -> None:
    """Splits the sequences of a folder of record files by length, and shuffles each bin into shards of its own.

    Bins of 128, 256, 384 and 512 tokens (quarters of the longest sequence allowed, unless --edges says): TARGET/128
    holds the sequences of at most 128 tokens, TARGET/256 those of 129 to 256, and so on, each as
    part_XXXXX_of_XXXXX.hdf5. A batch made of a fixed number from each bin has about the same number of tokens on every
    rank.
    """
    add_edges(parser)
    target = _run(parser, bin_records)
    bins = sorted((int(folder.name), folder) for folder in target.iterdir() if folder.name.isdigit())
    counts = ", ".join(f"{edge}: {len(source_files(folder))}" for edge, folder in bins)
    print(f"{target}: shards of each bin {counts}", file=sys.stderr)


def evalset_main(parser: argparse.ArgumentParser) -> None:
    """Picks the evaluation samples: --num-samples of a record file's n sequences, at int(i * (n / num_samples))."""
    parser.add_argument("--source", type=Path, required=True, help="instances of the evaluation text")
    parser.add_argument("--target", type=Path, required=True, help="records to write, part_eval_10k.hdf5")
    parser.add_argument("--num-samples", type=positive, default=NUM_EVAL_SAMPLES, help="(default %(default)s)")
    options = parser.parse_args()
    check_not_source(options.target, options.source)
    pick_samples(options.source, options.target, options.num_samples)
