"""A preparation and the steps that make its files, each of which keeps what is there already."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert.data.format import open_records, write_records
from bert.data.records import DataError
from input_preprocessing.dataset.inputs import Inputs, fill_phase1
from input_preprocessing.instances.options import SamplingConfig, sampling_digest
from input_preprocessing.instances.sampling import compile_first, write_instances
from input_preprocessing.records import shards
from input_preprocessing.records.deal import num_shards
from input_preprocessing.stage import manifest
from input_preprocessing.stage.folder import contents_of
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.stage.reading import read_text
from input_preprocessing.text.vocabulary import Vocabulary

UNPACKED_FOLDER = "training"  # of unpacked shards of --phases, however many they are: configs name it

Task = tuple[Path, Path, Vocabulary, SamplingConfig]  # a text, the file of its instances, and what they are made with
Made = tuple[int, str]  # sequences of a text, and its md5


def download_folder(options: argparse.Namespace) -> Path:
    return options.downloaddir or options.outputdir / "download"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One preparation: its options, what it reads and where it writes."""

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
        return "packed" if self.options.packed_data else "binned" if self.options.binned_data else "unpacked"

    @property
    def limit(self) -> int | None:
        """Most sequences, by --sequences; None: all."""
        return self.options.sequences

    @property
    def manifest(self) -> Path:
        return self.outputdir / f"prepared-{self.kind}.json"

    @property
    def edges(self) -> tuple[int, ...]:
        """Most tokens of each bin, of binned data."""
        return shards.edges_for(self.config.max_seq_length, self.options.edges) if self.kind == "binned" else ()

    def recipe(self) -> dict[str, object]:
        """All that decides the result but the text itself."""
        return {
            "vocab_md5": self.words.md5, **dataclasses.asdict(self.config), "kind": self.kind,
            "shards": self.options.shards,
            "max_sequences_per_row": self.options.max_sequences_per_row if self.kind == "packed" else 1,
            "edges": list(self.edges), "num_eval_samples": self.options.num_eval_samples, "sequences": self.limit,
            "folder": UNPACKED_FOLDER if self.options.phases and self.kind == "unpacked" else None,
        }  # fmt: skip

    def is_finished(self) -> bool:
        """Whether an earlier run made all this of this text, and the files are still there."""
        try:
            made = manifest.read(self.manifest)
            recipe = {"do_lower_case": True, **made.recipe}  # as before there was a choice
            if any(recipe.get(name) != value for name, value in self.recipe().items()):
                return False
            for path in (self.outputdir / name for name in made.files):
                if path.suffix == ".hdf5":
                    open_records(path)  # not cut short
                elif not path.is_file():
                    return False
        except DataError:
            return False
        texts = self.inputs.all_texts
        if self.limit:  # the others of a long text were not looked at
            texts = [path for path in texts if path.name in made.texts]
        if {path.name for path in texts} != set(made.texts):
            return False
        return contents_of(texts, "check text", self.options.jobs) == made.texts

    def fill_phase1(self) -> list[Path]:
        """Vocabulary, model sizes and the checkpoint converted; the files."""
        folder, download = self.outputdir / "phase1", download_folder(self.options)
        return fill_phase1(folder, self.inputs, download, self.words.md5, self.config.do_lower_case)


def _make_instances(task: Task) -> Made:
    """Writes the instances of a text unless they are there already."""
    source, target, words, config = task
    try:
        found, metadata = open_records(target)
    except DataError:
        pass
    else:
        made_of = (source.name, read_text(source, "--downloaddir")[1]), ("sampling", sampling_digest(config))
        if metadata.source == made_of and metadata.vocab_md5 == words.md5:
            return found.num_sequences, metadata.source[0][1]
    count, metadata = write_instances(source, target, words, config)
    return count, metadata.source[0][1]


def _make(tasks: Sequence[Task], jobs: int) -> dict[str, Made]:
    """The instances of these texts, by the texts' names."""
    weights = [text.stat().st_size for text, *_ in tasks]
    made = run_tasks("instances", _make_instances, tasks, jobs=jobs, weights=weights)
    return {text.name: found for (text, *_), found in zip(tasks, made, strict=True)}


def make_evaluation_instances(job: Job) -> None:
    """Instances of the evaluation text alone."""
    job.eval_instances.parent.mkdir(parents=True, exist_ok=True)
    compile_first(job.words, job.config)
    _make([(job.inputs.eval_text, job.eval_instances, job.words, job.config)], 1)


def make_all_instances(job: Job, part: tuple[int, int] = (0, 1)) -> dict[str, str]:
    """Instances of every text, or with --sequences of as many as that takes; the md5 of each of these texts.

    Args:
        job: the preparation.
        part: (i, n) makes those of every n-th text from the i-th on only; with --sequences the first part makes all,
            since how many texts that takes shows one after the other.

    Raises:
        DataError: the text holds nothing.
    """
    if job.limit:
        if part[0]:
            return {}
        part = (0, 1)
    targets = [*job.instances_of_texts, job.eval_instances]
    for folder in (job.instances, job.eval_instances.parent):
        folder.mkdir(parents=True, exist_ok=True)
    for stale in set(job.instances.glob("*.hdf5")) - set(targets):
        stale.unlink(missing_ok=True)
    texts = zip(job.inputs.all_texts[part[0] :: part[1]], targets[part[0] :: part[1]], strict=True)
    tasks = [(text, target, job.words, job.config) for text, target in texts]
    compile_first(job.words, job.config)
    made = _make_enough(tasks, job.limit, job.options.jobs) if job.limit else _make(tasks, job.options.jobs)
    total = sum(count for name, (count, _) in made.items() if name != job.inputs.eval_text.name)
    if not total and part[1] == 1:
        raise DataError(f"the text in {job.inputs.texts[0].parent} holds no words; check the part files")
    return {name: md5 for name, (_, md5) in made.items()}


def _make_enough(tasks: Sequence[Task], wanted: int, jobs: int) -> dict[str, Made]:
    """The instances of the evaluation text, the last, and of the first texts that hold so many; the last one is cut.

    A round makes those of a text a process; what it made too many is removed, so that --jobs changes nothing.
    """
    *rest, evaluation = tasks
    used = _make([evaluation], jobs)
    total = 0
    while rest and total < wanted:
        batch, rest = rest[:jobs], rest[jobs:]
        made = _make(batch, jobs)
        for text, target, *_ in batch:
            count, md5 = made[text.name]
            kept = min(count, wanted - total)
            if count and not kept:
                target.unlink()
                continue
            if kept < count:  # the first, which are in random order
                records, metadata = open_records(target)
                # So that a resumed run makes, and cuts, it again.
                metadata = dataclasses.replace(metadata, source=(*metadata.source, ("first", str(kept))))
                write_records(target, records.select(range(kept)), metadata)
            total += kept
            used[text.name] = count, md5
    if total < wanted:
        print(f"{total:,} sequences are all there are; --sequences {wanted} asked for more", file=sys.stderr)
    return used


def make_evaluation_set(job: Job) -> tuple[Path, int]:
    """Picks the evaluation samples of the instances of the evaluation text; the file, and how many they are."""
    eval_file = job.outputdir / "eval" / "part_eval_10k.hdf5"
    eval_file.parent.mkdir(exist_ok=True)
    return eval_file, shards.pick_samples(job.eval_instances, eval_file, job.options.num_eval_samples)


def make_training_files(job: Job, part: tuple[int, int] = (0, 1)) -> tuple[Path, str]:
    """Packed, binned or shuffled shards of all instances; their folder and their multiset digest.

    Raises:
        DataError: instances are missing, or too few for the shards wanted.
    """
    sources = job.instances_of_texts
    if job.limit:
        sources = [path for path in sources if path.exists()]
    if missing := [path for path in sources if not path.is_file()]:
        raise DataError(f"{missing[0]} is missing; run --only instances for every part first")
    options, seed, jobs = job.options, job.config.random_seed, job.options.jobs
    if job.kind == "binned":
        target = job.outputdir / "hdf5" / "bins"
        return target, shards.bin_records(
            job.instances, target, edges=job.edges, shards=options.shards, seed=seed, jobs=jobs, part=part
        )
    count = num_shards(sum(open_records(path)[0].num_sequences for path in sources), options.shards)
    if job.kind == "unpacked":
        target = job.outputdir / "hdf5" / (UNPACKED_FOLDER if options.phases else f"training-{count}")
        return target, shards.shuffle_records(job.instances, target, shards=count, seed=seed, jobs=jobs, part=part)
    target, most = job.outputdir / "packed_data", options.max_sequences_per_row
    return target, shards.pack_records(
        job.instances, target, shards=count, seed=seed, max_sequences_per_row=most, jobs=jobs, part=part
    )
