"""Repairs finished data sets: compares files with the manifest, and remakes those that differ.

Options are taken from the manifest, which stays unchanged: remade files must match it. Files that belong to no data set
are moved to OUTPUTDIR/set_aside instead of deleted.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bert.data.digests import add_multiset_digests
from bert.data.format import verify_records
from bert.data.records import DataError
from bert.data.shards import INDEX, is_index_of, write_index
from input_preprocessing.dataset import data_card, steps
from input_preprocessing.instances.options import SamplingConfig, sampling_config
from input_preprocessing.stage import manifest
from input_preprocessing.stage.cli import parser_of
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.text import vocabulary

SET_ASIDE = "set_aside"
_AGAIN = "; prepare again without --repair"
_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingConfig))
_OPTIONS = (*_FIELDS, "shards", "max_sequences_per_row", "edges", "num_eval_samples")


class Fault(NamedTuple):
    """A defect of a file in a prepared folder."""

    file: str  # path in the folder
    problem: str  # in words
    stray: bool = False  # belongs to no data set; other faulty files are remade


def examine(
    folder: Path, made: manifest.Manifest, others: Iterable[manifest.Manifest], jobs: int
) -> list[Fault]:
    """All faults of a data set's files, by file name.

    Args:
        folder: of the data set.
        made: its manifest.
        others: manifests of the other data sets in the folder.
        jobs: worker processes.

    Raises:
        DataError: every file is as listed, but the manifest says other numbers: it is not theirs.
    """
    faults, read = examine_files(folder, made, list(made.files), jobs=jobs)
    # Numbers are compared only where every file is as listed: of damaged ones they differ anyhow.
    if not faults and (problem := other_counts(made, read)):
        path = folder / f"prepared-{made.option('kind')}.json"
        raise DataError(f"{path} does not describe its files: {problem}{_AGAIN}")
    places = [*made.files, *(str(parent / INDEX) for parent in _by_folder(made.records))]
    faults += [
        Fault(name, "is a folder", stray=True) for name in places if (folder / name).is_dir()
    ]
    faults += [
        Fault(str(path.relative_to(folder)), "was not prepared", stray=True)
        for path in manifest.strays(folder, (made, *others))
    ]
    wrong = {fault.file for fault in faults if not fault.stray}
    for parent, names in _by_folder(made.records).items():
        shards = sorted(folder / name for name in names)
        if not wrong.intersection(names) and not is_index_of(folder / parent, shards):
            faults.append(Fault(str(parent / INDEX), "is missing or does not match the shards"))
    return sorted(faults, key=lambda fault: fault.file)


class Counts(NamedTuple):
    """What a record file adds to the numbers of its data set."""

    sequences: int
    rows: int
    tokens: int
    multiset_digest: str


def examine_files(
    folder: Path, made: manifest.Manifest, names: Sequence[str], *, jobs: int
) -> tuple[list[Fault], dict[str, Counts]]:
    """Faults of some of a data set's files, and the numbers of its sound record files."""
    weights = [path.stat().st_size if path.is_file() else 0 for path in map(folder.joinpath, names)]
    results = run_tasks(
        "read files", partial(_examine, folder, made), names, jobs=jobs, weights=weights
    )
    found = dict(zip(names, results, strict=True))
    faults = [Fault(name, text) for name, text in found.items() if isinstance(text, str)]
    return faults, {name: each for name, each in found.items() if isinstance(each, Counts)}


def _examine(folder: Path, made: manifest.Manifest, name: str) -> str | Counts | None:
    """The problem of a file; if there is none, the counts of a record file, or None for other files."""
    path, digest = folder / name, made.files[name]
    if not path.is_file():
        return "is missing"
    try:
        if path.suffix != ".hdf5":
            return None if manifest.md5_of(path) == digest else "has other contents than prepared"
        records, metadata = verify_records(path)
    except DataError as error:
        return str(error).removeprefix(str(path)).partition(";")[0].lstrip(" :")
    if metadata.content_digest != digest:
        return "has other sequences than prepared"
    if other := made.difference(name, metadata):
        return f"has {other}"
    num_tokens = len(records.input_ids)
    return Counts(records.num_sequences, records.num_rows, num_tokens, metadata.multiset_digest)


def other_counts(made: manifest.Manifest, read: dict[str, Counts]) -> str:
    """The first number that differs between a manifest and all of its files, in words; empty if none."""
    training = [read[name] for name in made.records]
    found = {
        "sequences": sum(each.sequences for each in training),
        "rows": sum(each.rows for each in training),
        "tokens": sum(each.tokens for each in training),
        "multiset_digest": add_multiset_digests([each.multiset_digest for each in training]),
        "eval_samples": sum(read[name].sequences for name in made.evaluation),
    }
    for name, value in found.items():
        if value != (said := getattr(made, name)):
            return f"it says {name} {said}, its files have {value}"
    return ""


def _by_folder(names: Iterable[str]) -> dict[Path, list[str]]:
    folders: dict[Path, list[str]] = {}
    for name in names:
        folders.setdefault(Path(name).parent, []).append(name)
    return folders


def find_manifests(options: argparse.Namespace) -> list[Path]:
    """Manifests of the requested data sets: of all kinds or one, in the folder and its phases.

    Raises:
        DataError: there are none.
    """
    folder: Path = options.outputdir
    kind = "packed" if options.packed_data else "binned" if options.binned_data else "*"
    phases = sorted(
        (path for path in folder.glob("*/prepared-*.json") if path.parent.name.isdigit()), key=str
    )
    paths = [
        path
        for path in (*sorted(folder.glob("prepared-*.json")), *phases)
        if path.match(f"prepared-{kind}.json")
    ]
    if not paths:
        raise DataError(
            f"{folder} has no prepared-{kind}.json: nothing to repair; prepare it without --repair"
        )
    return paths


def repair(options: argparse.Namespace) -> dict[str, Any]:
    """Examines and repairs the data sets of a folder; prints a report to stderr, and returns it for JSON.

    Raises:
        DataError: there is none, or a file cannot be remade as it was.
    """
    found: dict[str, list[Fault]] = {}
    made_again: list[str] = []
    set_aside: dict[str, str] = {}  # where each stray file went
    for path in find_manifests(options):
        folder, made = path.parent, manifest.read(path)
        others = [manifest.read(other) for other in folder.glob("prepared-*.json") if other != path]
        faults = examine(folder, made, others, options.jobs)
        if not data_card.is_current(folder):
            faults.append(Fault(data_card.NAME, "is missing or does not match the manifests"))
        found[str(path.relative_to(options.outputdir)).removesuffix(".json")] = faults
        for fault in faults:
            print(f"{folder / fault.file} {fault.problem}", file=sys.stderr)
        wrong = [fault.file for fault in faults if not fault.stray]
        files = [file for file in wrong if file in made.files]
        job = (
            _job(folder, made, options, files) if files else None
        )  # checks the inputs before anything is changed
        for name in (fault.file for fault in faults if fault.stray):
            first = folder / SET_ASIDE / name
            places = (
                first,
                *(first.with_name(f"{first.name}.{number}") for number in range(2, 10_000)),
            )
            target = next(place for place in places if not place.exists())
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, target)
            print(f"{folder / name} was moved to {target}", file=sys.stderr)
            set_aside[name] = str(target.relative_to(folder))
        if job:
            evaluation = any(name in made.evaluation for name in files)
            training = [folder / name for name in made.records if name in files]
            for shard in training:  # a shard with the right source would be considered finished
                shard.unlink(missing_ok=True)
            if any(name.startswith("phase1/") for name in files):
                job.fill_phase1()
            if training:
                steps.make_instances(job)
            elif evaluation:
                steps.make_instances(
                    job, part=(len(job.inputs.texts), len(job.inputs.texts) + 1)
                )  # the last text
            if evaluation:
                steps.make_evaluation_set(job)
            if training:
                steps.make_training_files(job)
            job.inputs.check_unchanged()
        for parent in {Path(name).parent for name in wrong if Path(name).name == INDEX}:
            write_index(
                folder / parent,
                sorted(folder / name for name in made.records if Path(name).parent == parent),
            )
        # Everything is read once more: what was remade must be what the manifest lists.
        if wrong and (left := examine(folder, made, others, options.jobs)):
            reason = "cannot be remade as it was: its inputs are missing or changed, or this is another version"
            raise DataError(
                f"{folder / left[0].file} {left[0].problem} and {reason}; prepare without --repair"
            )
        if data_card.NAME in wrong:
            data_card.write(folder)
        shutil.rmtree(folder / "work", ignore_errors=True)
        made_again += [str((folder / file).relative_to(options.outputdir)) for file in wrong]
        for file in wrong:
            print(f"{folder / file} was made again", file=sys.stderr)
    total = sum(map(len, found.values()))
    count = f"{total} file{'s' * (total != 1)}"
    summary = (
        f"{count} repaired, all are as prepared"
        if total
        else "nothing to repair, every file is as prepared"
    )
    print(f"{options.outputdir}: {summary}", file=sys.stderr)
    faults_found = {name: [fault._asdict() for fault in faults] for name, faults in found.items()}
    return {
        "folder": str(options.outputdir),
        "found": faults_found,
        "made_again": made_again,
        "set_aside": set_aside,
    }


def _job(
    folder: Path, made: manifest.Manifest, options: argparse.Namespace, wrong: list[str]
) -> steps.Job:
    """The preparation described by a manifest, after checking that the inputs of the wrong files are unchanged.

    Raises:
        DataError: an input has changed, an option contradicts the manifest, or the disk is too small.
    """
    if count := made.option("sequences"):
        raise DataError(
            f"{folder} has only {count} sequences, of an earlier version; prepare again without --repair"
        )
    edges, kind = made.option("edges"), made.option("kind")
    recorded = {name: made.option(name) for name in _OPTIONS} | {
        "edges": tuple(edges) if edges else None
    }
    for name in _OPTIONS:
        if getattr(options, name) not in (parser_of("prepare").get_default(name), recorded[name]):
            flag = f"--{name.replace('_', '-')}"
            actual = (
                f"{folder} was prepared with {flag} {recorded[name]}, not {getattr(options, name)}"
            )
            raise DataError(f"{actual}; omit {flag}")
    own = argparse.Namespace(
        **{
            **vars(options), **recorded, "outputdir": folder, "downloaddir": steps.download_folder(options),
            "packed_data": kind == "packed", "binned_data": kind == "binned", "phases": made.option("folder") or None,
        }
    )  # fmt: skip
    inputs = steps.find_inputs(
        steps.download_folder(options), folder / "phase1", options.vocab_file
    )
    job = steps.Job(
        options=own, config=sampling_config(own), inputs=inputs, words=vocabulary.load(inputs.vocab)
    )
    again = "; restore the original, or prepare again without --repair"
    if job.words.md5 != made.recipe["vocab_md5"]:
        raise DataError(f"{inputs.vocab} is another vocabulary (md5 {job.words.md5}){again}")
    steps.check_config(inputs, job.words, job.config)
    if any(name.startswith("phase1/") for name in wrong):
        for path in inputs.others:
            if made.files.get(f"phase1/{path.name}") != manifest.md5_of(path):
                raise DataError(f"{path} is another configuration{again}")
    training = any(name in made.records for name in wrong)
    evaluation = any(name in made.evaluation for name in wrong)
    # With the training instances those of the evaluation text are made, too.
    texts = [
        *(inputs.texts if training else ()),
        *([inputs.eval_text] if training or evaluation else []),
    ]
    for name, md5 in manifest.contents_of(texts, "check text", options.jobs).items():
        if made.texts.get(name) != md5:
            raise DataError(
                f"{name} in {inputs.eval_text.parent} is another text (md5 {md5}){again}"
            )
    if training:
        # 0.5: the instances alone, since most of the shards are there.
        steps.check_needs(
            steps.needs_of(inputs.sizes, job.config, options.jobs, share=0.5), folder, "work"
        )
    return job
