"""The instances of a text file, made in this process."""

from __future__ import annotations

import sys
from pathlib import Path

from bert.data.compiled import is_kept
from bert.data.format import write_records
from bert.data.records import Metadata, Records
from input_preprocessing.instances.options import SamplingConfig, sampling_digest
from input_preprocessing.instances.sampling import make_instances, sample
from input_preprocessing.stage.reading import read_text
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
    text = tokenize(data, words, config.do_lower_case)
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


def compile_first(words: Vocabulary, config: SamplingConfig) -> None:
    """Compiles what makes instances, on the first run of this version: once, before all workers do so side by side."""
    if not is_kept(sample):
        print("compiling; this is done on the first run only, and can take half a minute", file=sys.stderr)
        make_instances(tokenize(b"A text, a caf\xc3\xa9.\n\nAnother.\n", words), words, config)
