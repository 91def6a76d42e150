"""What a preparation starts from: the files under DOWNLOADDIR, and whether disk and memory will do."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from bert.data.records import DataError
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.records.deal import SEQUENCES_PER_GROUP
from input_preprocessing.stage.cli import human_bytes, human_time
from input_preprocessing.stage.reading import Stamp, changed, check_is_text, stamp_of
from input_preprocessing.text.vocabulary import Vocabulary

# Measured with the benchmark's options; for the estimates only.
_RECORD_BYTES_PER_TEXT_BYTE = 0.9  # for each time the text is duplicated
_TEXT_BYTES_PER_SECOND = 2.5e6  # all steps, one process, dupe_factor 10
_PROCESS_BYTES = 200e6
_BYTES_PER_TEXT_BYTE = 15  # of the text file under work, to make its instances
_GROUP_BYTES = SEQUENCES_PER_GROUP * 700  # records of a group, which a packing worker holds twice

# The benchmark's public files: 13.2 GB of text in 501 files, its archive, the TensorFlow checkpoint and the converted.
PUBLIC_TEXT_BYTES = 13_200_000_000
_PUBLIC_TEXT_FILES = 501
_LARGEST_PUBLIC_TEXT = 32_851_144
_OTHER_DOWNLOADS_BYTES = 5_500_000_000 + 4_035_000_000 + 1_350_000_000


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The files of a download folder."""

    texts: tuple[Path, ...]
    eval_text: Path
    vocab: Path
    others: tuple[Path, ...]  # copied to phase1 as they are

    stamps: tuple[Stamp, ...]  # of the texts and the evaluation text, when they were found

    @property
    def all_texts(self) -> list[Path]:
        """Every text file, the evaluation text last."""
        return [*self.texts, self.eval_text]

    @property
    def sizes(self) -> list[int]:
        """Bytes of every text file, the evaluation text last."""
        return [path.stat().st_size for path in self.all_texts]

    def check_unchanged(self) -> None:
        """Raises DataError where a text is not as it was when it was found, as while it is still being copied."""
        for path, stamp in zip(self.all_texts, self.stamps, strict=True):
            if not path.is_file() or stamp_of(path) != stamp:
                raise changed(path)


def find_inputs(download: Path, phase1: Path, vocab_file: Path | None) -> Inputs:
    """The input files.

    Args:
        download: folder that holds results4/.
        phase1: folder where vocab.txt and bert_config.json are looked for if `download` lacks them.
        vocab_file: a vocabulary to use instead.

    Raises:
        DataError: one is missing, or part files of several sets are mixed.
    """
    folder = download / "results4"
    texts = sorted(path for path in folder.glob("part-*-of-*") if path.is_file())
    if not texts:
        raise DataError(
            f"no text {folder}/part-XXXXX-of-XXXXX; download the data, or make it of your own text with "
            f"python -m input_preprocessing.corpus --outputdir {download.parent} --input FILE"
        )
    _check_set(folder, [path.name for path in texts])
    found = [path for path in (folder / "eval.txt", download / "eval.txt") if path.is_file()]
    if not found:
        raise DataError(f"no evaluation text {folder}/eval.txt; download it or see input_preprocessing.corpus")
    for path in (*texts, found[0]):
        with open(path, "rb") as file:
            check_is_text(path, file.read(8))
    if empty := [path for path in (*texts, found[0]) if not path.stat().st_size]:
        raise DataError(f"{empty[0]} is empty; copy it again")
    places = [download, folder, phase1]  # phase1 last: it may hold what an earlier run copied there
    vocab = vocab_file or next((p / "vocab.txt" for p in places if (p / "vocab.txt").is_file()), None)
    if vocab is None:
        raise DataError(f"no vocab.txt in {download} or {phase1}; put it there or give --vocab-file")
    config = next((p / "bert_config.json" for p in places if (p / "bert_config.json").is_file()), None)
    others = (config,) if config else ()
    stamps = tuple(stamp_of(path) for path in (*texts, found[0]))
    return Inputs(texts=tuple(texts), eval_text=found[0], vocab=vocab, others=others, stamps=stamps)


def _check_set(folder: Path, names: list[str]) -> None:
    """Checks that the part files of these names are all of one set."""
    totals = sorted({name.rpartition("-of-")[2] for name in names})
    if len(totals) > 1:
        raise DataError(f"{folder} is mixed: it has parts of {' and of '.join(totals)}; move those of one set away")
    count = int(totals[0]) if totals[0].isdecimal() else len(names)
    wanted = {f"part-{i:05d}-of-{count:05d}" for i in range(count)}
    if missing := sorted(wanted - set(names)):
        raise DataError(f"{folder} is incomplete: {len(missing)} of {count} parts are missing, see {missing[0]}")
    if odd := sorted(set(names) - wanted):
        raise DataError(f"{folder}: {odd[0]} is not part of this set of {count}; move it away")


def check_config(inputs: Inputs, words: Vocabulary, config: SamplingConfig) -> None:
    """Checks that the model of bert_config.json takes these tokens and lengths.

    Raises:
        DataError: it does not.
    """
    for path in inputs.others:
        try:
            model = json.loads(path.read_text())
            vocab_size, positions = int(model["vocab_size"]), int(model["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no BERT configuration ({error}); replace it") from error
        if vocab_size < len(words):
            raise DataError(f"{path} has vocab_size {vocab_size}, {inputs.vocab} has {len(words)} tokens; use a pair")
        if positions < config.max_seq_length:
            reason = f"{positions} max_position_embeddings, fewer than --max-seq-length {config.max_seq_length}"
            raise DataError(f"{path} has {reason}; lower the one or replace the other")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a preparation takes, about."""

    text_bytes: int
    num_files: int
    disk: float  # bytes on top of the input files that are there, the download's among them
    download: float = 0.0  # bytes
    memory: float  # bytes
    seconds: float
    workers: int


def needs_of(
    sizes: list[int], config: SamplingConfig, jobs: int, nodes: int = 1, sequences: int | None = None
) -> Needs:
    """Needs for text files of these sizes, in bytes; with so many sequences at most."""
    total = sum(sizes)
    workers = min(jobs, -(-len(sizes) // nodes))
    if sequences is not None:  # those files alone that hold so many, one more a process, and the evaluation text
        bytes_of_text = sequences * _sequence_bytes(config) / config.dupe_factor / _RECORD_BYTES_PER_TEXT_BYTE
        total = min(total, int(bytes_of_text) + workers * max(sizes) + sizes[-1])
    records = total * config.dupe_factor * _RECORD_BYTES_PER_TEXT_BYTE
    worker = _PROCESS_BYTES + max(_BYTES_PER_TEXT_BYTE * max(sizes), 2 * min(records, _GROUP_BYTES))
    return Needs(
        text_bytes=total,
        num_files=len(sizes),
        disk=2 * records + 10_000_000,
        memory=workers * worker,
        seconds=10 + total * config.dupe_factor / 10 / _TEXT_BYTES_PER_SECOND / (workers * nodes),
        workers=workers,
    )


def _sequence_bytes(config: SamplingConfig) -> float:
    """Bytes of the records of a sequence at most."""
    return 2 * config.max_seq_length + 4 * config.max_predictions_per_seq + 19


def public_needs(config: SamplingConfig, jobs: int, sequences: int | None = None) -> Needs:
    """Needs for the benchmark's own text before it is downloaded; the time is without the download's."""
    count = _PUBLIC_TEXT_FILES - 1
    sizes = [_LARGEST_PUBLIC_TEXT, *[(PUBLIC_TEXT_BYTES - _LARGEST_PUBLIC_TEXT) // count] * count]
    needs = needs_of(sizes, config, jobs, sequences=sequences)
    download = float(PUBLIC_TEXT_BYTES + _OTHER_DOWNLOADS_BYTES)
    return dataclasses.replace(needs, disk=needs.disk + download, download=download)


def check_needs(needs: Needs, outputdir: Path, *folders: str) -> None:
    """Tells what the run will take; stops where the disk is too small.

    Args:
        needs: of the run.
        outputdir: where it writes.
        folders: names in `outputdir` whose files are the run's, made earlier.

    Raises:
        DataError: the disk is too small.
    """
    files = (path for folder in folders for path in (outputdir / folder).rglob("*"))
    present = sum(path.stat().st_size for path in files if path.is_file())
    free = shutil.disk_usage(outputdir).free
    fetched = f", after a download of {human_bytes(needs.download)}" if needs.download else ""
    print(
        f"{human_bytes(needs.text_bytes)} of text in {needs.num_files} files: about {human_bytes(needs.disk)} of disk "
        f"({human_bytes(free)} free), {human_bytes(needs.memory)} of memory and {human_time(needs.seconds)} with "
        f"{needs.workers} jobs{fetched}",
        file=sys.stderr,
    )
    if free + present < needs.disk:
        raise DataError(
            f"{outputdir} has {human_bytes(free)} free, about {human_bytes(needs.disk - present)} are needed; "
            "make room or choose another --outputdir"
        )
    available = available_memory()
    if available and available < needs.memory:
        print(
            f"warning: {human_bytes(available)} of memory are free, {human_bytes(needs.memory)} may be needed; "
            f"--jobs {max(1, int(needs.workers * available / needs.memory))} needs less",
            file=sys.stderr,
        )


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
