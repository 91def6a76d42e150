"""Inputs, requirements and steps of a preparation; steps keep finished files."""

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bert.data import prepared
from bert.data.digests import digest_of_tensors
from bert.data.format import atomic_file, open_records, verify_records, without_digests
from bert.data.records import DataError
from common.files import object_of, text_of
from input_preprocessing.checkpoints.convert import convert, read_pytorch
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.instances.sampling import (
    compile_first,
    metadata_of,
    write_instances,
)
from input_preprocessing.records import bins, evalset, pack, sharding, shuffle
from input_preprocessing.stage import manifest
from input_preprocessing.stage.cli import human_bytes, say
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.stage.reading import (
    Stamp,
    changed,
    check_is_text,
    read_text,
    stamp_of,
)
from input_preprocessing.text.vocabulary import Vocabulary

# Per dupe_factor; measured with the benchmark's options.
_RECORD_BYTES_PER_TEXT_BYTE = 0.9
# The benchmark's public files: the text, then with its archive, the TensorFlow and the converted
# checkpoint.
PUBLIC_TEXT = 13_200_000_000
CHECKPOINT = "model.ckpt-28252"
PUBLIC_BYTES = PUBLIC_TEXT + 5_500_000_000 + 4_035_000_000 + 1_350_000_000
# Of unpacked shards with --phases, whatever their number, since configs refer to it.
UNPACKED_FOLDER = "training"


class Inputs(NamedTuple):
    """Input files in a download folder."""

    texts: tuple[Path, ...]
    eval_text: Path
    vocab: Path
    model: Path | None  # bert_config.json
    stamps: tuple[Stamp, ...]  # of the texts and the evaluation text, when found

    @property
    def all_texts(self) -> list[Path]:
        """Every text file, the evaluation text last."""
        return [*self.texts, self.eval_text]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each text file, the evaluation text last."""
        return [path.stat().st_size for path in self.all_texts]

    def check_unchanged(self) -> None:
        """Raises DataError if a text has changed since it was found, for example because it is
        still being copied.
        """
        for path, stamp in zip(self.all_texts, self.stamps, strict=True):
            if not path.is_file() or stamp_of(os.stat(path)) != stamp:
                raise changed(path)


def find_inputs(download: Path, phase1: Path, vocab_file: Path | None) -> Inputs:
    """Finds the input files.

    Args:
        download: folder with results4/.
        phase1: folder with vocab.txt and bert_config.json if `download` lacks them.
        vocab_file: overrides vocab.txt.

    Raises:
        DataError: one is missing, or part files of several sets are mixed.
    """
    folder = download / "results4"
    texts = sorted(path for path in folder.glob("part-*-of-[0-9]*") if path.is_file())
    if not texts:
        command = f"python -m input_preprocessing corpus --outputdir {download.parent} --input FILE"
        advice = f"download the data, or make it from your own text with {command}"
        raise DataError(f"no text {folder}/part-XXXXX-of-XXXXX; {advice}")
    # The last name says how many parts the set has.
    names, total = {path.name for path in texts}, texts[-1].name.rpartition("-")[2]
    wanted = {f"part-{i:05d}-of-{total}" for i in range(int(total))}
    if odd := sorted(names ^ wanted):
        problem = f"of {len(names)} parts {odd[0]} is missing or does not belong to the others"
        raise DataError(f"{folder} is no whole set: {problem}")
    eval_text = folder / "eval.txt"
    if not eval_text.is_file():
        advice = "download it, or see `corpus` to make it from your text"
        raise DataError(f"no evaluation text {eval_text}; {advice}")
    texts.append(eval_text)
    # Archives and UTF-16 are told by their first bytes, before anything is made.
    for path in texts:
        with open(path, "rb") as file:
            check_is_text(path, file.read(8))
    stamps = tuple(stamp_of(os.stat(path)) for path in texts)
    if empty := [
        path for path, (size, *_) in zip(texts, stamps, strict=True) if not size
    ]:
        raise DataError(f"{empty[0]} is empty; copy it again")
    # phase1 last: it may hold copies of an earlier run.
    vocabularies = [download / "vocab.txt", phase1 / "vocab.txt"]
    vocab = vocab_file or next(filter(Path.is_file, vocabularies), None)
    if vocab is None:
        raise DataError(
            f"no vocab.txt in {download} or {phase1}; put it there or give --vocab-file"
        )
    models = [download / "bert_config.json", phase1 / "bert_config.json"]
    model = next(filter(Path.is_file, models), None)
    return Inputs(
        texts=tuple(texts[:-1]),
        eval_text=eval_text,
        vocab=vocab,
        model=model,
        stamps=stamps,
    )


def check_config(inputs: Inputs, words: Vocabulary, config: SamplingConfig) -> None:
    """Raises DataError if the model of bert_config.json does not fit the vocabulary or sequence
    length.
    """
    if (path := inputs.model) is None:
        return
    try:
        model = json.loads(path.read_text())
        vocab_size, positions = (
            int(model["vocab_size"]),
            int(model["max_position_embeddings"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a BERT configuration ({error}); replace it"
        ) from error
    # Fewer tokens than rows are fine: models are padded to a multiple of 8.
    if vocab_size < len(words):
        raise DataError(
            f"{path} has vocab_size {vocab_size}, {inputs.vocab} {len(words)} tokens; give a pair"
        )
    if positions < config.max_seq_length:
        reason = f"{positions} max_position_embeddings, fewer than --max-seq-length {config.max_seq_length}"
        raise DataError(f"{path} has {reason}; lower the latter or replace the file")


def check_disk(
    outputdir: Path,
    text_bytes: int,
    config: SamplingConfig,
    *,
    share: float = 1.0,
    download: int = 0,
) -> None:
    """Prints the disk that a preparation takes, and raises DataError if there is less.

    Args:
        outputdir: where it writes; made if need be.
        text_bytes: of all texts.
        config: options of the instances.
        share: of the instances and shards that are yet to be made.
        download: bytes to download first.
    """
    outputdir.mkdir(parents=True, exist_ok=True)
    # Twice: the instances stay until all shards are made.
    records = 2 * text_bytes * config.dupe_factor * _RECORD_BYTES_PER_TEXT_BYTE
    needed = share * (records + 10_000_000) + download
    free = shutil.disk_usage(outputdir).free
    takes = f"about {human_bytes(needed)} of disk ({human_bytes(free)} free)"
    say(f"{human_bytes(text_bytes)} of text: {takes}")
    # What an earlier run made counts as room: it is used, or replaced.
    folders = (
        "work",
        "packed_data",
        "hdf5",
        "eval",
        *(["download"] if download else []),
    )
    files = (path for folder in folders for path in (outputdir / folder).rglob("*"))
    needed -= sum(path.stat().st_size for path in files if path.is_file())
    if free < needed:
        lacking = f"{outputdir} has {human_bytes(free)} free, about {human_bytes(needed)} are needed"
        raise DataError(f"{lacking}; make room or choose another --outputdir")


def download_folder(options: argparse.Namespace) -> Path:
    return options.downloaddir or options.outputdir / "download"


class Job(NamedTuple):
    """A preparation: options, inputs and output paths."""

    options: argparse.Namespace
    config: SamplingConfig
    inputs: Inputs
    words: Vocabulary

    @property
    def outputdir(self) -> Path:
        return self.options.outputdir

    @property
    def instances(self) -> Path:
        """Folder of the instances of each text file."""
        return self.outputdir / "work" / "instances"

    @property
    def instances_of_texts(self) -> list[Path]:
        return [self.instances / f"{path.name}.hdf5" for path in self.inputs.texts]

    @property
    def eval_instances(self) -> Path:
        return self.outputdir / "work" / "eval" / "eval_all.hdf5"

    @property
    def kind(self) -> str:
        if self.options.packed_data:
            return "packed"
        return "binned" if self.options.binned_data else "unpacked"

    @property
    def manifest(self) -> Path:
        return self.outputdir / f"prepared-{self.kind}.json"

    @property
    def edges(self) -> tuple[int, ...]:
        """Maximal tokens of each bin of binned data."""
        return (
            bins.edges_of(self.config.max_seq_length) if self.kind == "binned" else ()
        )

    def digests_of(self, paths: list[Path]) -> dict[str, str]:
        """md5 of files of the data set, by their path in it."""
        return {
            str(path.relative_to(self.outputdir)): manifest.md5_of(path)
            for path in paths
        }

    def recipe(self) -> dict[str, object]:
        """Everything that determines the result, except the text."""
        # Unpacked rows hold one sequence, whatever the option says.
        most = self.options.max_sequences_per_row if self.kind == "packed" else 1
        return {
            "vocab_md5": self.words.md5,
            **dataclasses.asdict(self.config),
            "kind": self.kind,
            "shards": self.options.shards,
            "max_sequences_per_row": most,
            "edges": list(self.edges),
            "num_eval_samples": self.options.num_eval_samples,
            "sequences": None,  # all; earlier versions could make fewer
            "folder": UNPACKED_FOLDER
            if self.options.phases and self.kind == "unpacked"
            else None,
        }

    def is_finished(self) -> bool:
        """Whether an earlier run made these files from this text with this recipe, and they still
        exist.
        """
        try:
            made = prepared.read(self.manifest)
            # Cheapest first: options, then headers, then the texts.
            if made.recipe != self.recipe():
                return False
            for path in (self.outputdir / name for name in made.files):
                if path.suffix == ".hdf5":
                    open_records(path)  # not cut short
                elif not path.is_file():
                    return False
        except DataError:
            return False
        texts = self.inputs.all_texts
        if {path.name for path in texts} != set(made.texts):
            return False
        # Last, since it reads every text.
        return (
            manifest.contents_of(texts, "check text", self.options.jobs) == made.texts
        )

    def fill_phase1(self) -> list[Path]:
        """Makes vocabulary, model sizes and initial checkpoint unless up to date, by content;
        returns the files.

        Raises:
            DataError: the vocabulary changed meanwhile, or the checkpoint cannot be converted.
        """
        phase1, download = self.outputdir / "phase1", download_folder(self.options)
        phase1.mkdir(exist_ok=True)
        made = [_copy(self.inputs.vocab, phase1 / "vocab.txt")]
        # Another vocabulary was put there since this run read it.
        if manifest.md5_of(made[0]) != self.words.md5:
            raise changed(self.inputs.vocab)
        if self.inputs.model:
            made.append(_copy(self.inputs.model, phase1 / "bert_config.json"))
        cased, text = (
            phase1 / "tokenizer_config.json",
            json.dumps({"do_lower_case": False}) + "\n",
        )
        if self.config.do_lower_case:
            cased.unlink(missing_ok=True)
        else:  # marks a cased vocabulary for exports and fine-tuning
            made.append(cased)
            if text_of(cased) != text.strip():
                manifest.write_text(cased, text)
        converted = phase1 / f"{CHECKPOINT}.pt"
        folders = download, download / "tf1_ckpt", download / "tf2_ckpt"
        prefixes = [folder / CHECKPOINT for folder in folders]
        if prefix := next(
            (path for path in prefixes if Path(f"{path}.index").is_file()), None
        ):
            _convert(prefix, converted, self.inputs.model)
        return [*made, converted] if converted.is_file() else made


def _copy(source: Path, target: Path) -> Path:
    """The target, after it was made a copy of the source unless it is one."""
    if target.is_file():
        if manifest.md5_of(target) == manifest.md5_of(source):
            return target
        say(f"{target} is replaced by {source}, which differs")
    with atomic_file(target) as unfinished:
        shutil.copyfile(source, unfinished)
    return target


def _convert(prefix: Path, target: Path, model: Path | None) -> None:
    """Converts the TensorFlow checkpoint unless up to date.

    `model.ckpt-28252.json` beside the converted one has the md5 of source and target, and the
    digest of the tensors, which the closed division checks.
    """
    note = target.with_suffix(".json")
    sources = [
        Path(f"{prefix}.index"),
        *sorted(prefix.parent.glob(f"{prefix.name}.data-*")),
    ]
    digests = [
        manifest.md5_of(path) for path in [*sources, *([model] if model else [])]
    ]
    made = {
        "source": hashlib.md5(" ".join(digests).encode()).hexdigest(),
        "target": manifest.md5_of(target) if target.is_file() else "",
    }
    # As long as source and target are those noted, so are the tensors.
    noted = object_of(note)
    if noted != made | {"tensors": noted.get("tensors", "")}:
        say(f"converting {prefix} to {target}")
        convert(prefix, target, "mlperf", bert_config=model)
        tensors = digest_of_tensors(read_pytorch(target).items())
        made |= {"target": manifest.md5_of(target), "tensors": tensors}
        manifest.write_text(note, json.dumps(made) + "\n")


def _make_instances_of(
    words: Vocabulary, config: SamplingConfig, task: tuple[Path, Path]
) -> tuple[int, str]:
    """Writes the instances of a text to a file unless up to date; returns their number and the md5
    of the text.
    """
    source, target = task
    if target.is_file():
        try:
            records, metadata = verify_records(target)
        except DataError as error:
            say(f"{str(error).partition(';')[0]}; it is made again")
        else:
            md5 = read_text(source, "--downloaddir")[1]
            if without_digests(metadata) == metadata_of(source, md5, words, config):
                return records.num_sequences, md5
    count, metadata = write_instances(source, target, words, config)
    return count, metadata.source[0][1]


def make_instances(job: Job, *, only_evaluation: bool = False) -> dict[str, str]:
    """Makes the instances of all texts, or of the evaluation text; returns the md5 of each text.

    Raises:
        DataError: the text is empty.
    """
    targets = [*job.instances_of_texts, job.eval_instances]
    for folder in (job.instances, job.eval_instances.parent):
        folder.mkdir(parents=True, exist_ok=True)
    # The next stage takes every file in the folder, so those of other texts must go.
    for stale in set(job.instances.glob("*.hdf5")) - set(targets):
        stale.unlink(missing_ok=True)
    tasks = list(zip(job.inputs.all_texts, targets, strict=True))
    if only_evaluation:
        tasks = tasks[-1:]
    compile_first(job.words, job.config)
    make = partial(_make_instances_of, job.words, job.config)
    made = run_tasks("instances", make, tasks, jobs=job.options.jobs)
    if not only_evaluation and not sum(count for count, _ in made[:-1]):
        raise DataError(
            f"the text in {job.inputs.texts[0].parent} has no words; check the part files"
        )
    return {text.name: md5 for (text, _), (_, md5) in zip(tasks, made, strict=True)}


def make_evaluation_set(job: Job) -> tuple[Path, int]:
    """Picks the evaluation samples from the instances of the evaluation text; returns the file and
    their number.
    """
    eval_file = job.outputdir / "eval" / "part_eval_10k.hdf5"
    eval_file.parent.mkdir(exist_ok=True)
    return eval_file, evalset.pick_samples(
        job.eval_instances, eval_file, job.options.num_eval_samples
    )


def make_training_files(job: Job) -> tuple[Path, str]:
    """Makes packed, binned or shuffled shards of all instances; returns their folder and multiset
    digest.

    Raises:
        DataError: too few instances for the shards wanted.
    """
    options, target = job.options, job.outputdir / "hdf5" / "bins"
    given = {"seed": job.config.random_seed, "jobs": options.jobs}
    if job.kind == "binned":
        return target, bins.bin_records(
            job.instances, target, shards=options.shards, **given
        )
    given["shards"] = sharding.num_shards(
        sum(open_records(path)[0].num_sequences for path in job.instances_of_texts),
        options.shards,
    )
    if job.kind == "unpacked":
        target = target.with_name(
            UNPACKED_FOLDER if options.phases else f"training-{given['shards']}"
        )
        return target, shuffle.shuffle_records(job.instances, target, **given)
    target, most = job.outputdir / "packed_data", options.max_sequences_per_row
    return target, pack.pack_records(
        job.instances, target, max_sequences_per_row=most, **given
    )
