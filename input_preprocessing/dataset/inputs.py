"""What a preparation starts from: files under DOWNLOADDIR, their copies in phase1/, enough disk and memory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.checkpoints.convert import convert
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.records.deal import SEQUENCES_PER_GROUP
from input_preprocessing.stage.benchmark import NUM_PARTS
from input_preprocessing.stage.cli import human_bytes, human_time
from input_preprocessing.stage.manifest import md5_of
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
_LARGEST_PUBLIC_TEXT = 32_851_144
CHECKPOINT = "model.ckpt-28252"
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
            if not path.is_file() or stamp_of(os.stat(path)) != stamp:
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
            f"python -m input_preprocessing corpus --outputdir {download.parent} --input FILE"
        )
    names = {path.name for path in texts}
    totals = sorted({name.rpartition("-of-")[2] for name in names})
    if len(totals) > 1:
        raise DataError(f"{folder} is mixed: it has parts of {' and of '.join(totals)}; move those of one set away")
    count = int(totals[0]) if totals[0].isdecimal() else len(names)
    wanted = {f"part-{i:05d}-of-{count:05d}" for i in range(count)}
    if missing := sorted(wanted - names):
        raise DataError(f"{folder} is incomplete: {len(missing)} of {count} parts are missing, see {missing[0]}")
    if odd := sorted(names - wanted):
        raise DataError(f"{folder}: {odd[0]} is not part of this set of {count}; move it away")
    found = [path for path in (folder / "eval.txt", download / "eval.txt") if path.is_file()]
    if not found:
        raise DataError(
            f"no evaluation text {folder}/eval.txt; download it or see python -m input_preprocessing corpus"
        )
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
    stamps = tuple(stamp_of(os.stat(path)) for path in (*texts, found[0]))
    return Inputs(texts=tuple(texts), eval_text=found[0], vocab=vocab, others=others, stamps=stamps)


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


def fill_phase1(phase1: Path, inputs: Inputs, download: Path, vocab_md5: str, lower_case: bool) -> list[Path]:
    """Makes vocabulary, model sizes and first checkpoint where missing, or there of other inputs; returns the files.

    What was made of what is known by content: `model.ckpt-28252.json` beside the converted checkpoint has both md5.

    Args:
        phase1: folder to write to.
        inputs: vocabulary and bert_config.json to copy.
        download: folder to look for the TensorFlow checkpoint in, and MLCommons' folders of them in it.
        vocab_md5: of the vocabulary that the records are made with.
        lower_case: whether their text was lower-cased; where not, tokenizer_config.json says so, as Hugging Face's.

    Raises:
        DataError: the vocabulary has changed since, or the checkpoint cannot be converted.
    """
    phase1.mkdir(exist_ok=True)
    targets = []
    for source in (inputs.vocab, *inputs.others):
        target = phase1 / ("vocab.txt" if source == inputs.vocab else source.name)
        targets.append(target)
        if target.is_file() and md5_of(target) == md5_of(source):
            continue
        if target.is_file():
            print(f"{target} is replaced by {source}, which differs", file=sys.stderr)
        with atomic_file(target) as partial:
            shutil.copyfile(source, partial)
    if md5_of(targets[0]) != vocab_md5:
        raise changed(inputs.vocab)
    cased, text = phase1 / "tokenizer_config.json", json.dumps({"do_lower_case": False}) + "\n"
    if lower_case:
        cased.unlink(missing_ok=True)
    else:  # exports and fine-tuning know a cased vocabulary by it
        targets.append(cased)
        if not cased.is_file() or cased.read_text(encoding="utf-8") != text:
            with atomic_file(cased) as partial:
                partial.write_text(text, encoding="utf-8")
    converted = phase1 / f"{CHECKPOINT}.pt"
    prefixes = [folder / CHECKPOINT for folder in (download, download / "tf1_ckpt", download / "tf2_ckpt")]
    if prefix := next((path for path in prefixes if Path(f"{path}.index").is_file()), None):
        note, config = converted.with_suffix(".json"), next(iter(inputs.others), None)
        made_of = [Path(f"{prefix}.index"), *sorted(prefix.parent.glob(f"{prefix.name}.data-*"))]
        digests = [md5_of(path) for path in [*made_of, *([config] if config else [])]]
        source_md5, noted = hashlib.md5(" ".join(digests).encode()).hexdigest(), None
        with suppress(OSError, ValueError):
            noted = json.loads(note.read_text())
        if not converted.is_file() or noted != {"source": source_md5, "target": md5_of(converted)}:
            print(f"converting {prefix} to {converted}", file=sys.stderr)
            convert(prefix, converted, "mlperf", bert_config=config)
            with atomic_file(note) as partial:
                partial.write_text(json.dumps({"source": source_md5, "target": md5_of(converted)}) + "\n")
    return [*targets, converted] if converted.is_file() else targets


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
        sequence_bytes = 2 * config.max_seq_length + 4 * config.max_predictions_per_seq + 19  # at most
        bytes_of_text = sequences * sequence_bytes / config.dupe_factor / _RECORD_BYTES_PER_TEXT_BYTE
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


def public_needs(config: SamplingConfig, jobs: int, sequences: int | None = None) -> Needs:
    """Needs for the benchmark's own text before it is downloaded; the time is without the download's."""
    sizes = [_LARGEST_PUBLIC_TEXT, *[(PUBLIC_TEXT_BYTES - _LARGEST_PUBLIC_TEXT) // NUM_PARTS] * NUM_PARTS]
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
    text, disk, memory = human_bytes(needs.text_bytes), human_bytes(needs.disk), human_bytes(needs.memory)
    takes = f"about {disk} of disk ({human_bytes(free)} free), {memory} of memory and {human_time(needs.seconds)}"
    told = f"{text} of text in {needs.num_files} files: {takes} with {needs.workers} jobs{fetched}"
    print(told, file=sys.stderr)
    if free + present < needs.disk:
        lacking = f"{outputdir} has {human_bytes(free)} free, about {human_bytes(needs.disk - present)} are needed"
        raise DataError(f"{lacking}; make room or choose another --outputdir")
    available = available_memory()
    if available and available < needs.memory:
        fewer = max(1, int(needs.workers * available / needs.memory))
        lacking = f"{human_bytes(available)} of memory are free, {memory} may be needed"
        print(f"warning: {lacking}; --jobs {fewer} needs less", file=sys.stderr)


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
