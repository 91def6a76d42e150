"""The two phases of pretraining from scratch: one text, prepared at each length into a folder of its own."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from bert.data.records import DataError
from input_preprocessing.instances.options import SamplingConfig

PUBLISHED = "128:20,512:80"  # of NVIDIA DeepLearningExamples
FOLDER = "training"  # of unpacked shards, however many they are: configs name it

Phases = tuple[tuple[int, int], ...]


def parse_phases(text: str) -> Phases:
    """argparse type: '128:20,512:80' -> ((128, 20), (512, 80)), tokens and masked tokens of a sequence at most."""
    phases = []
    for part in text.split(","):
        length, colon, masked = part.partition(":")
        if not (colon and length.isdecimal() and masked.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of LENGTH:MASKED, such as {PUBLISHED}")
        phases.append((int(length), int(masked)))
    if any(short >= long for (short, _), (long, _) in itertools.pairwise(phases)):
        raise argparse.ArgumentTypeError(f"{text!r}: the lengths of the phases do not grow")
    return tuple(phases)


def add_phases(parser: argparse.ArgumentParser) -> None:
    """--phases."""
    parser.add_argument(
        "--phases",
        nargs="?",
        type=parse_phases,
        const=PUBLISHED,
        metavar="LENGTH:MASKED,...",
        help=f"prepare each phase of pretraining in OUTPUTDIR/LENGTH: {PUBLISHED} unless given",
    )


def longest(options: argparse.Namespace) -> int:
    """Tokens of the longest sequence that will be made."""
    length: int = options.phases[-1][0] if options.phases else options.max_seq_length
    return length


def split(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of each phase's preparation; without --phases, of the one there is.

    Only the first downloads. `phases_after` is how many follow, for the estimate of the disk.

    Raises:
        DataError: the lengths are given twice.
    """
    if options.phases is None:
        return [argparse.Namespace(**vars(options), phases_after=0)]
    default = SamplingConfig()
    for name in ("max_seq_length", "max_predictions_per_seq"):
        if getattr(options, name) != getattr(default, name):
            raise DataError(f"--phases gives the lengths of sequences: leave --{name.replace('_', '-')} out")
    outputdir: Path = options.outputdir
    common = {**vars(options), "downloaddir": options.downloaddir or outputdir / "download"}
    parts = []
    for number, (length, masked) in enumerate(options.phases):
        own = {"outputdir": outputdir / str(length), "max_seq_length": length, "max_predictions_per_seq": masked}
        own |= {"skip_download": options.skip_download or number > 0, "phases_after": len(options.phases) - 1 - number}
        parts.append(argparse.Namespace(**(common | own)))
    return parts
