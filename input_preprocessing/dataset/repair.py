"""Repairs finished data sets: compares files with the manifest, and remakes those that differ.

Options are taken from the manifest, which stays unchanged: remade files must match it. Files that
belong to no data set are moved to OUTPUTDIR/set_aside instead of deleted.
"""

import argparse
import dataclasses
import itertools
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bert.data import prepared
from bert.data.format import verify_records
from bert.data.records import DataError
from bert.data.shards import INDEX, write_index
from input_preprocessing.dataset import steps
from input_preprocessing.instances.options import SamplingConfig, sampling_config
from input_preprocessing.stage import manifest
from input_preprocessing.stage.cli import say
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.text import vocabulary

SET_ASIDE = "set_aside"
_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingConfig))
_OPTIONS = (*_FIELDS, "shards", "max_sequences_per_row", "num_eval_samples")


class Fault(NamedTuple):
    """A defect of a file in a prepared folder."""

    file: str  # path in the folder
    problem: str  # in words
    stray: bool = False  # belongs to no data set; other faulty files are remade


def examine(folder: Path, made: prepared.Manifest, jobs: int) -> list[Fault]:
    """All faults of a data set's files, by file name."""
    paths = [folder / name for name in made.files]
    look = partial(_problem_of, folder, made)
    conditions = run_tasks("read files", look, paths, jobs=jobs)
    faults = [
        Fault(name, text)
        for name, text in zip(made.files, conditions, strict=True)
        if text
    ]
    wrong = {fault.file for fault in faults}
    # An index beside a faulty shard is written anew with it.
    for parent in manifest.odd_indices(folder, made, wrong):
        faults.append(
            Fault(str(parent / INDEX), "is missing or does not match the shards")
        )
    for path in manifest.strays(folder):
        name = str(path.relative_to(folder))
        faults.append(Fault(name, "was not prepared", stray=True))
    return sorted(faults)


def _problem_of(folder: Path, made: prepared.Manifest, path: Path) -> str:
    """The problem of a file, in words; empty if there is none."""
    name = str(path.relative_to(folder))
    digest = made.files[name]
    if not path.is_file():
        return "is missing"
    if path.suffix != ".hdf5":
        return (
            ""
            if manifest.md5_of(path) == digest
            else "has other contents than prepared"
        )
    try:
        _, metadata = verify_records(path)
    except DataError as error:
        return str(error).removeprefix(str(path)).partition(";")[0].lstrip(" :")
    if metadata.content_digest != digest:
        return "has other sequences than prepared"
    # Right contents, but a header that states other options than the manifest.
    other = made.difference(name, metadata)
    return f"has {other}" if other else ""


def find_manifests(folder: Path) -> list[Path]:
    """Manifests of the data sets in a folder and its phases. Raises DataError if there are none."""
    paths = sorted(
        [*folder.glob("prepared-*.json"), *folder.glob("[0-9]*/prepared-*.json")]
    )
    if not paths:
        raise DataError(f"{folder} has no prepared-*.json: prepare it without --repair")
    return paths


def repair(options: argparse.Namespace) -> list[Fault]:
    """Examines and repairs the data sets of a folder and its phases; reports to stderr.

    Raises:
        DataError: there is none, or a file cannot be remade as it was.
    """
    manifests = find_manifests(options.outputdir)
    faults = [fault for path in manifests for fault in _repair(path, options)]
    count = f"{len(faults)} file{'s' * (len(faults) != 1)} repaired, all are"
    summary = count if faults else "nothing to repair, every file is"
    say(f"{options.outputdir}: {summary} as prepared")
    return faults


def _repair(path: Path, options: argparse.Namespace) -> list[Fault]:
    folder, made = path.parent, prepared.read(path)
    faults = examine(folder, made, options.jobs)
    for fault in faults:
        say(f"{folder / fault.file} {fault.problem}")
    wrong = [fault.file for fault in faults if not fault.stray]
    files = [name for name in wrong if name in made.files]
    # Checks the inputs before anything is changed.
    job = _job(folder, made, options, files) if files else None
    odd = [
        fault.file for fault in faults if fault.stray or (folder / fault.file).is_dir()
    ]
    _set_aside(folder, odd)
    if job:
        _remake(job, made, files)
    for parent in {Path(name).parent for name in wrong if Path(name).name == INDEX}:
        shards = [folder / name for name in made.records if Path(name).parent == parent]
        write_index(folder / parent, sorted(shards))
    # Everything is read once more: what was remade must be what the manifest lists.
    if wrong and (left := examine(folder, made, options.jobs)):
        reason = "its inputs are missing or changed, or this is another version"
        raise DataError(
            f"{folder / left[0].file} {left[0].problem} and cannot be remade as it was: {reason}; "
            "prepare without --repair"
        )
    shutil.rmtree(folder / "work", ignore_errors=True)
    for file in wrong:
        say(f"{folder / file} was made again")
    return faults


def _set_aside(folder: Path, names: Sequence[str]) -> None:
    folders = (folder / SET_ASIDE / str(number) for number in itertools.count(1))
    free = next(free for free in folders if not free.exists())
    for name in names:
        (free / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / name, free / name)
        say(f"{folder / name} was moved to {free / name}")


def _remake(job: steps.Job, made: prepared.Manifest, files: Sequence[str]) -> None:
    """Makes the files again, from new instances."""
    training = [name for name in files if name in made.records]
    is_evaluation = any(name in made.evaluation for name in files)
    # A shard with the right source would be considered finished.
    for name in training:
        (job.outputdir / name).unlink(missing_ok=True)
    if any(name.startswith("phase1/") for name in files):
        job.fill_phase1()
    if training or is_evaluation:
        steps.make_instances(job, only_evaluation=not training)
    if is_evaluation:
        steps.make_evaluation_set(job)
    if training:
        steps.make_training_files(job)
    job.inputs.check_unchanged()


def _job(
    folder: Path,
    made: prepared.Manifest,
    options: argparse.Namespace,
    wrong: Sequence[str],
) -> steps.Job:
    """The preparation described by a manifest, after checking that the inputs of the wrong files
    are unchanged.

    Raises:
        DataError: an input has changed, or the disk is too small.
    """
    recipe, download = made.recipe, steps.download_folder(options)
    recorded = {name: recipe[name] for name in _OPTIONS}
    job_options = argparse.Namespace(
        **{
            **vars(options),
            **recorded,
            "outputdir": folder,
            "downloaddir": download,
            "packed_data": recipe["kind"] == "packed",
            "binned_data": recipe["kind"] == "binned",
            "phases": recipe["folder"],
        }
    )
    inputs = steps.find_inputs(download, folder / "phase1", options.vocab_file)
    words = vocabulary.load(inputs.vocab)
    job = steps.Job(
        options=job_options,
        config=sampling_config(job_options),
        inputs=inputs,
        words=words,
    )
    again = "restore the original, or prepare again without --repair"
    if words.md5 != recipe["vocab_md5"]:
        raise DataError(
            f"{inputs.vocab} is another vocabulary (md5 {words.md5}); {again}"
        )
    steps.check_config(inputs, words, job.config)
    training = any(name in made.records for name in wrong)
    # With the training instances those of the evaluation text are made, too.
    texts = inputs.all_texts if training else []
    if any(name in made.evaluation for name in wrong):
        texts = texts or [inputs.eval_text]
    for name, md5 in manifest.contents_of(texts, "check text", options.jobs).items():
        if made.texts.get(name) != md5:
            where = f"{name} in {inputs.eval_text.parent}"
            raise DataError(f"{where} is another text (md5 {md5}); {again}")
    if training:
        # 0.5: the instances alone, since most of the shards are there.
        steps.check_disk(folder, sum(inputs.sizes), job.config, share=0.5)
    return job
