"""Makes training instances from one text file: tokenise, pair sentences, mask.

The text has one sentence per line and a blank line between documents. The result is bit for bit that of the reference's
create_pretraining_data.py with the same options: the same sequences in the same order. `--format tfrecord` writes the
file that the reference would write, for trainers that read those; the other stages take records.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
from pathlib import Path

from bert.data.format import write_records
from bert.data.records import Metadata, Records
from input_preprocessing.instances.sampling import SamplingConfig, make_instances
from input_preprocessing.stage.cli import check_not_source, run, stage_parser
from input_preprocessing.stage.reading import read_text
from input_preprocessing.tensorflow_files.tfrecord import write_tfrecord
from input_preprocessing.text import vocabulary
from input_preprocessing.text.tokenization import tokenize
from input_preprocessing.text.vocabulary import Vocabulary


def write_instances(source: Path, target: Path, words: Vocabulary, config: SamplingConfig) -> tuple[int, Metadata]:
    """Writes the instances of the text file `source`; returns their number and the metadata written.

    Raises:
        DataError: the text cannot be read or the target not written.
    """
    records, metadata = instances_of(source, words, config)
    return records.num_sequences, write_records(target, records, metadata)


def instances_of(source: Path, words: Vocabulary, config: SamplingConfig) -> tuple[Records, Metadata]:
    """The instances of a text file, and what they were made of.

    Raises:
        DataError: the text cannot be read.
    """
    data, md5 = read_text(source, "--input-file")
    text = tokenize(data, words)
    del data
    records = make_instances(text, words, config)
    metadata = Metadata(
        max_seq_length=config.max_seq_length,
        vocab_md5=words.md5,
        random_seed=config.random_seed,
        dupe_factor=config.dupe_factor,
        source=((source.name, md5), ("sampling", sampling_digest(config))),
    )
    return records, metadata


def sampling_digest(config: SamplingConfig) -> str:
    """Short digest of all sampling options, to tell files made with other options."""
    return hashlib.md5(repr(sorted(dataclasses.asdict(config).items())).encode()).hexdigest()


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The reference's options, with the values of the benchmark as defaults."""
    default = SamplingConfig()
    for field in dataclasses.fields(SamplingConfig):
        value = getattr(default, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, help="(default %(default)s)")


def sampling_config(options: argparse.Namespace) -> SamplingConfig:
    """The options of `add_sampling_options` as given."""
    return SamplingConfig(**{field.name: getattr(options, field.name) for field in dataclasses.fields(SamplingConfig)})


def _main(options: argparse.Namespace) -> None:
    check_not_source(options.output_file, options.input_file)
    words, config = vocabulary.load(options.vocab_file), sampling_config(options)
    records, metadata = instances_of(options.input_file, words, config)
    if options.format == "tfrecord":
        write_tfrecord(options.output_file, records, config.max_seq_length, config.max_predictions_per_seq)
    else:
        write_records(options.output_file, records, metadata)
    note = "" if records.num_sequences else " (the text has no token)"
    print(f"{options.output_file}: {records.num_sequences:,} sequences{note}", file=sys.stderr)


def main() -> None:
    """Command line."""
    parser = stage_parser("instances", __doc__)
    parser.add_argument("--input-file", type=Path, required=True, help="text, one sentence per line")
    parser.add_argument("--vocab-file", type=Path, required=True, help="WordPiece vocab.txt")
    parser.add_argument("--output-file", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--format",
        choices=("hdf5", "tfrecord"),
        default="hdf5",
        help="records or TFRecord (default %(default)s)",
    )
    add_sampling_options(parser)
    run(parser, _main)
