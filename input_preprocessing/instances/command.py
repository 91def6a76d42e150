"""Makes training instances from one text file: tokenise, pair sentences, mask.

The text has one sentence per line and a blank line between documents. The result is bit-identical
to that of the reference's create_pretraining_data.py with the same options: the same sequences in
the same order. `--format tfrecord` writes the reference's file format for other trainers; the other
stages need records.
"""

import argparse
import sys

from input_preprocessing.instances.options import sampling_config
from input_preprocessing.stage.cli import check_not_source, say


def main(options: argparse.Namespace) -> None:
    check_not_source(options.output_file, options.input_file)
    config = sampling_config(options)
    # Keep numba from importing SciPy's linear algebra, which takes as long as numba itself and is
    # not used here.
    sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]
    # Imported here, so that --help and usage errors need not wait for numba.
    from bert.data.format import write_records
    from input_preprocessing.instances.sampling import compile_first, instances_of
    from input_preprocessing.tensorflow_files.tfrecord import (
        Widths,
        notes_of_sizes,
        write_tfrecord,
    )
    from input_preprocessing.text import vocabulary

    words = vocabulary.load(options.vocab_file)
    words.check_case(config.do_lower_case)
    # Says that it compiles: on the first run that takes longer than a small text.
    compile_first(words, config)
    records, metadata = instances_of(options.input_file, words, config)
    if options.format == "tfrecord":
        write_tfrecord(
            options.output_file,
            records,
            Widths(config.max_seq_length, config.max_predictions_per_seq),
        )
    else:
        write_records(options.output_file, records, metadata)
    notes = (
        notes_of_sizes([options.output_file]) if options.format == "tfrecord" else []
    )
    summary = f"{options.output_file}: {records.num_sequences:,} sequences"
    say("\n".join([summary, *notes]))
