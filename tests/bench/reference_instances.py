"""Runs the reference's create_pretraining_data.py for against_reference.py; needs TensorFlow.

Writes a TFRecord file and prints the CPU seconds of the instances, and those with the file, without
TensorFlow's startup.

usage: python tests/bench/reference_instances.py FOLDER TEXT VOCAB OUTPUT
       FOLDER holds create_pretraining_data.py and tokenization.py of MLCommons' training repository
"""

import importlib
import random
import sys
import time
from typing import Any

# The benchmark's options, from the reference's README.
OPTIONS = {"max_seq_length": 512, "dupe_factor": 10, "short_seq_prob": 0.1, "masked_lm_prob": 0.15}  # fmt: skip
# 15% of 512 tokens are 76.8; the seed is the reference's own.
MAX_PREDICTIONS, SEED = 76, 12345


def main() -> None:
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    folder, text, vocab, output = sys.argv[1:]
    try:
        tensorflow: Any = importlib.import_module("tensorflow.compat.v1")
        tensorflow.logging.set_verbosity(tensorflow.logging.ERROR)
        sys.modules["tensorflow"] = tensorflow  # the reference uses TensorFlow 1's API
        sys.path.insert(0, folder)
        # The reference's flags would refuse our arguments.
        sys.argv = sys.argv[:1]
        tensorflow.flags.FLAGS([sys.argv[0]], known_only=True)
        create: Any = importlib.import_module("create_pretraining_data")
        tokenization: Any = importlib.import_module("tokenization")
    except ModuleNotFoundError as error:
        sys.exit(f"reference_instances.py: {error}: run it with a Python that has TensorFlow")  # fmt: skip
    tensorflow.flags.FLAGS.mark_as_parsed()
    # CPU seconds from here on: TensorFlow is imported by now.
    begin = time.process_time()
    tokenizer = tokenization.FullTokenizer(vocab_file=vocab, do_lower_case=True)
    instances = create.create_training_instances(
        [text], tokenizer, max_predictions_per_seq=MAX_PREDICTIONS, rng=random.Random(SEED), **OPTIONS
    )  # fmt: skip
    made = time.process_time()
    create.write_instance_to_example_files(
        instances, tokenizer, OPTIONS["max_seq_length"], MAX_PREDICTIONS, [output]
    )
    print(made - begin, time.process_time() - begin)


if __name__ == "__main__":
    main()
