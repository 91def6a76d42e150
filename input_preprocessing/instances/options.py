"""Options of the instance maker. Imports nothing that takes time, so that --help answers at once."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from dataclasses import dataclass

from bert.data.records import DataError
from input_preprocessing.stage.cli import UNSAID, add_lower_case, add_switch


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Options of the reference, under its names.

    Raises:
        DataError: a value out of range.
    """

    max_seq_length: int = 512
    max_predictions_per_seq: int = 76
    masked_lm_prob: float = 0.15
    short_seq_prob: float = 0.1
    random_seed: int = 12345
    dupe_factor: int = 10
    do_lower_case: bool = True
    nsp: bool = True  # pairs of sentences for next-sentence prediction; without, documents in full sequences

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_seq_length", 5, 32767), ("max_predictions_per_seq", 1, 32767), ("masked_lm_prob", 0, 1),
            ("short_seq_prob", 0, 1), ("dupe_factor", 1, 1000),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise DataError(f"--{name.replace('_', '-')} is {value}; give a value from {low} to {high}")


def sampling_digest(config: SamplingConfig) -> str:
    """Short digest of all sampling options, to tell files made with other options; of UNSAID only what differs."""
    options = sorted(dataclasses.asdict(config).items() - UNSAID.items())
    return hashlib.md5(repr(options).encode()).hexdigest()


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The reference's options, with the values of the benchmark as defaults."""
    default = SamplingConfig()
    for field in dataclasses.fields(SamplingConfig):
        value = getattr(default, field.name)
        if field.name not in UNSAID:
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, type=type(value), default=value, help="(default %(default)s)")
    add_lower_case(parser)
    add_switch(parser, "--nsp", "0: no pairs of sentences; documents in full sequences, for NSP=0")


def sampling_config(options: argparse.Namespace) -> SamplingConfig:
    """The options of `add_sampling_options` as given."""
    return SamplingConfig(**{field.name: getattr(options, field.name) for field in dataclasses.fields(SamplingConfig)})
