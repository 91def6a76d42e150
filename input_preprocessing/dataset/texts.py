"""The instances of every text of a preparation, or of as many texts as --sequences asks for."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from bert.data.format import open_records, write_records
from bert.data.records import DataError
from input_preprocessing.dataset.job import Job
from input_preprocessing.instances.make import compile_first, write_instances
from input_preprocessing.instances.options import SamplingConfig, sampling_digest
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.stage.reading import read_text
from input_preprocessing.text.vocabulary import Vocabulary

Task = tuple[Path, Path, Vocabulary, SamplingConfig]  # a text, the file of its instances, and what they are made with
Made = tuple[int, str]  # sequences of a text, and its md5


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


def make_evaluation_instances(job: Job) -> None:
    """Instances of the evaluation text alone."""
    job.eval_instances.parent.mkdir(parents=True, exist_ok=True)
    compile_first(job.words, job.config)
    _make([(job.inputs.eval_text, job.eval_instances, job.words, job.config)], 1)


def _make(tasks: Sequence[Task], jobs: int) -> dict[str, Made]:
    """The instances of these texts, by the texts' names."""
    weights = [text.stat().st_size for text, *_ in tasks]
    made = run_tasks("instances", _make_instances, tasks, jobs=jobs, weights=weights)
    return {text.name: found for (text, *_), found in zip(tasks, made, strict=True)}


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
            if total + count > wanted:
                _cut(target, wanted - total)
            total += min(count, wanted - total)
            if target.exists():
                used[text.name] = count, md5
    if total < wanted:
        print(f"{total:,} sequences are all there are; --sequences {wanted} asked for more", file=sys.stderr)
    return used


def _cut(path: Path, count: int) -> None:
    """Leaves the first sequences of a file, which are in random order, or no file."""
    if not count:
        path.unlink()
        return
    records, metadata = open_records(path)
    source = (*metadata.source, ("first", str(count)))  # so that a resumed run makes, and cuts, it again
    write_records(path, records.select(range(count)), dataclasses.replace(metadata, source=source))
