"""Speed of making training instances of a text (tokenize, pair, mask, digest, write), in MB per CPU
second, and beside MLCommons' published create_pretraining_data.py: its CPU seconds over ours, in
turns, without startup, of the instances, and with their TFRecord file; and whether the instances
are identical. The reference takes minutes for a megabyte.

usage: python tests/bench/against_reference.py TEXT VOCAB [FILE [PYTHON]]
       TEXT has one sentence per line and a blank line after each document; FILE is the reference's
       create_pretraining_data.py, beside its tokenization.py; PYTHON: one with TensorFlow (this one)
"""

import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[1:1] = [str(ROOT / "bench"), str(ROOT)]
from lib import emit  # noqa: E402

from bert.data.format import content_digest  # noqa: E402
from input_preprocessing.instances.options import SamplingConfig  # noqa: E402
from input_preprocessing.instances.sampling import instances_of, write_instances  # noqa: E402
from input_preprocessing.tensorflow_files import tfrecord  # noqa: E402
from input_preprocessing.text import vocabulary  # noqa: E402

TURNS = 3


def cpu_seconds(function):
    """CPU seconds of a call and its child processes; wall time misleads on a shared machine."""

    def spent():
        # Children count from the moment that they are waited for.
        kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
        usages = [resource.getrusage(kind) for kind in kinds]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    before = spent()
    function()
    return spent() - before


def speed(text, vocab, folder):
    written = text, folder / "instances.hdf5", vocabulary.load(vocab), SamplingConfig()
    write_instances(*written)  # compiles, warms the file cache
    turns = [cpu_seconds(lambda: write_instances(*written)) for _ in range(TURNS)]
    megabytes = text.stat().st_size / 1e6
    return {"ours_mb_per_cpu_second": round(megabytes / statistics.median(turns), 2)}


def compared(text, vocab, reference, python, folder):
    theirs, mine = (folder / f"{name}.tfrecord" for name in ("theirs", "mine"))
    script = Path(__file__).with_name("reference_instances.py")
    command = [python, *map(str, (script, reference.parent, text, vocab, theirs))]
    words, config = vocabulary.load(vocab), SamplingConfig()
    widths = tfrecord.Widths(config.max_seq_length, config.max_predictions_per_seq)
    records, _ = instances_of(text, words, config)
    tfrecord.write_tfrecord(mine, records, widths)
    ratios, with_file = [], []
    for _ in range(TURNS):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        instances = cpu_seconds(lambda: instances_of(text, words, config))
        file = cpu_seconds(lambda: tfrecord.write_tfrecord(mine, records, widths))
        # Of the same turn, so that a slow moment of the machine cancels out.
        made, written = map(float, done.stdout.split()[-2:])
        ratios.append(round(made / instances, 1))
        with_file.append(round(written / (instances + file), 1))
    same = tfrecord.read_tfrecord(theirs)[0]
    return {
        "ratios_to_reference": ratios,
        "with_tfrecord": with_file,
        "same_instances": content_digest(records) == content_digest(same),
    }


def main(text, vocab, reference=None, python=sys.executable):
    paths = [Path(name) for name in (text, vocab, reference) if name]
    for path in paths:
        if not path.is_file():
            sys.exit(f"{path}: no such file")
    if shutil.which(python) is None:
        sys.exit(f"{python}: no such program")
    with tempfile.TemporaryDirectory() as name:
        figures = speed(*paths[:2], Path(name))
        if reference:
            figures |= compared(*paths, python, Path(name))
        emit("instances", figures)


if __name__ == "__main__":
    if len(sys.argv) not in range(3, 6):
        sys.exit(__doc__)
    main(*sys.argv[1:])
