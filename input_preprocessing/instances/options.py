"""The instance maker's options and command. Imports nothing that takes time, so that --help answers at once."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from bert.data.records import DataError
from input_preprocessing.stage.cli import add_lower_case, check_not_source


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

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_seq_length", 5, 32767), ("max_predictions_per_seq", 1, 32767), ("masked_lm_prob", 0, 1),
            ("short_seq_prob", 0, 1), ("dupe_factor", 1, 1000),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise DataError(f"--{name.replace('_', '-')} is {value}; give a value from {low} to {high}")


def sampling_digest(config: SamplingConfig) -> str:
    """Short digest of all sampling options, to tell files made with other options.

    What is lower-cased has the digest that it had before there was a choice.
    """
    options = dataclasses.asdict(config)
    if config.do_lower_case:
        del options["do_lower_case"]
    return hashlib.md5(repr(sorted(options.items())).encode()).hexdigest()


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The reference's options, with the values of the benchmark as defaults."""
    default = SamplingConfig()
    for field in dataclasses.fields(SamplingConfig):
        value = getattr(default, field.name)
        if field.name != "do_lower_case":
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, type=type(value), default=value, help="(default %(default)s)")
    add_lower_case(parser)


def sampling_config(options: argparse.Namespace) -> SamplingConfig:
    """The options of `add_sampling_options` as given."""
    return SamplingConfig(**{field.name: getattr(options, field.name) for field in dataclasses.fields(SamplingConfig)})


def main(parser: argparse.ArgumentParser) -> None:
    """Makes training instances from one text file: tokenise, pair sentences, mask.

    The text has one sentence per line and a blank line between documents. The result is bit for bit that of the
    reference's create_pretraining_data.py with the same options: the same sequences in the same order. `--format
    tfrecord` writes the file that the reference would write, for trainers that read those; the other stages take
    records.
    """
    parser.add_argument("--input-file", type=Path, required=True, help="text, one sentence per line")
    parser.add_argument("--vocab-file", type=Path, required=True, help="WordPiece vocab.txt")
    parser.add_argument("--output-file", type=Path, required=True, help="file to write")
    kinds = ("hdf5", "tfrecord")
    parser.add_argument("--format", choices=kinds, default="hdf5", help="records or TFRecord (default %(default)s)")
    add_sampling_options(parser)
    options = parser.parse_args()
    check_not_source(options.output_file, options.input_file)
    config = sampling_config(options)
    # numba imports SciPy's linear algebra where there is one, which takes as long as numba; nothing here uses it.
    sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]
    # Here, not above: the compiler takes longer to import than --help and a mistake need.
    from bert.data.format import write_records
    from input_preprocessing.instances.sampling import instances_of
    from input_preprocessing.tensorflow_files.tfrecord import Widths, write_tfrecord
    from input_preprocessing.text import vocabulary

    words = vocabulary.load(options.vocab_file)
    words.check_case(config.do_lower_case)
    records, metadata = instances_of(options.input_file, words, config)
    if options.format == "tfrecord":
        write_tfrecord(options.output_file, records, Widths(config.max_seq_length, config.max_predictions_per_seq))
    else:
        write_records(options.output_file, records, metadata)
    note = "" if records.num_sequences else " (the text has no token)"
    print(f"{options.output_file}: {records.num_sequences:,} sequences{note}", file=sys.stderr)
