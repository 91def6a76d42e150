"""Repairs finished data sets: finds what is wrong by the manifest, and makes again only that.

The options are those of the manifest. A file that no data set holds is moved to OUTPUTDIR/set_aside: it may be
someone's. The manifest stays as it is; what was made again has to be what it says.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bert.data.records import DataError
from bert.data.shards import INDEX, write_index
from input_preprocessing.dataset import data_card
from input_preprocessing.dataset.inputs import check_config, check_needs, find_inputs, needs_of
from input_preprocessing.dataset.job import Job
from input_preprocessing.dataset.steps import download_folder, fill_phase1, make_evaluation_set, make_training_files
from input_preprocessing.dataset.texts import make_all_instances, make_evaluation_instances
from input_preprocessing.instances.options import SamplingConfig, sampling_config
from input_preprocessing.stage import manifest
from input_preprocessing.stage.examine import Fault, examine, examine_files, to_dicts
from input_preprocessing.stage.folder import contents_of
from input_preprocessing.stage.manifest import Manifest
from input_preprocessing.text import vocabulary

SET_ASIDE = "set_aside"
_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingConfig))
_OPTIONS = (*_FIELDS, "shards", "max_sequences_per_row", "edges", "num_eval_samples", "sequences")


@dataclass
class Report:
    """What was found and done, by data set."""

    found: dict[str, list[Fault]] = field(default_factory=dict)
    made_again: list[str] = field(default_factory=list)
    set_aside: dict[str, str] = field(default_factory=dict)  # where each stray file went

    def to_json(self, folder: Path) -> str:
        """The report for programs."""
        found = {name: to_dicts(faults) for name, faults in self.found.items()}
        return json.dumps(
            {"folder": str(folder), "found": found, "made_again": self.made_again, "set_aside": self.set_aside}
        )


def find_manifests(options: argparse.Namespace) -> list[Path]:
    """The manifests of the data sets asked for: of all kinds, or one; of the folder, and of its phases.

    Raises:
        DataError: there are none.
    """
    folder: Path = options.outputdir
    kind = "packed" if options.packed_data else "binned" if options.binned_data else "*"
    phases = sorted((path for path in folder.glob("*/prepared-*.json") if path.parent.name.isdigit()), key=str)
    paths = [path for path in (*sorted(folder.glob("prepared-*.json")), *phases) if path.match(f"prepared-{kind}.json")]
    if not paths:
        raise DataError(f"{folder} has no prepared-{kind}.json, so nothing to repair; prepare it without --repair")
    return paths


def repair(options: argparse.Namespace) -> Report:
    """Examines and repairs the data sets of a folder, and tells on stderr what it found and did.

    Raises:
        DataError: there is none, or a file cannot be made again as it was.
    """
    report = Report()
    for path in find_manifests(options):
        _repair_set(path, options, report)
    total = sum(map(len, report.found.values()))
    files = f"{total} file{'s' * (total != 1)}"
    line = f"{files} mended, all are as prepared" if total else "nothing is wrong, every file is as prepared"
    print(f"{options.outputdir}: {line}", file=sys.stderr)
    return report


def _repair_set(path: Path, options: argparse.Namespace, report: Report) -> None:
    folder, made = path.parent, manifest.read(path)
    others = [manifest.read(other) for other in folder.glob("prepared-*.json") if other != path]
    faults = [*examine(folder, made, others, jobs=options.jobs), *_card_faults(folder)]
    name = str(path.relative_to(options.outputdir)).removesuffix(".json")
    report.found[name] = faults
    for fault in faults:
        print(f"{folder / fault.file} {fault.problem}", file=sys.stderr)
    wrong = [fault.file for fault in faults if not fault.stray]
    files = [file for file in wrong if file in made.files]
    job = _job(folder, made, options, files) if files else None  # what it is made of is checked before anything changes
    for fault in faults:
        if fault.stray:
            report.set_aside[fault.file] = _set_aside(folder, fault.file)
    if job:
        _make_again(job, made, files)
        if left := examine_files(folder, made, files, jobs=options.jobs):
            raise DataError(
                f"{folder / left[0].file} {left[0].problem}, and cannot be made as it was: what it is made of is "
                "missing or has changed, or this is another version; prepare again without --repair"
            )
    _write_indexes(folder, made, wrong)
    if data_card.NAME in wrong:
        data_card.write(folder)
    shutil.rmtree(folder / "work", ignore_errors=True)
    report.made_again += [str((folder / file).relative_to(options.outputdir)) for file in wrong]
    for file in wrong:
        print(f"{folder / file} was made again", file=sys.stderr)


def _card_faults(folder: Path) -> list[Fault]:
    if data_card.is_current(folder):
        return []
    return [Fault(data_card.NAME, "is missing or does not tell what the manifests do")]


def _write_indexes(folder: Path, made: Manifest, wrong: Iterable[str]) -> None:
    """Writes the indexes that were found wrong; `make_shards` has written those of the folders it worked on."""
    for parent in {Path(name).parent for name in wrong if Path(name).name == INDEX}:
        write_index(folder / parent, sorted(folder / name for name in made.records if Path(name).parent == parent))


def _set_aside(folder: Path, name: str) -> str:
    """Moves a file away, under a name that is free; where it went."""
    target = first = folder / SET_ASIDE / name
    number = 1
    while target.exists():
        number += 1
        target = first.with_name(f"{first.name}.{number}")
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(folder / name, target)
    print(f"{folder / name} was moved to {target}", file=sys.stderr)
    return str(target.relative_to(folder))


def _job(folder: Path, made: Manifest, options: argparse.Namespace, wrong: list[str]) -> Job:
    """The preparation of a manifest, once all that the wrong files are made of is found to be what it was.

    Raises:
        DataError: something is not, an option contradicts the manifest, or the disk is too small.
    """
    own = _recorded(options, folder, made)
    inputs = find_inputs(download_folder(options), folder / "phase1", options.vocab_file)
    job = Job(options=own, config=sampling_config(own), inputs=inputs, words=vocabulary.load(inputs.vocab))
    again = "; put back the one that was prepared, or prepare again without --repair"
    if job.words.md5 != made.recipe["vocab_md5"]:
        raise DataError(f"{inputs.vocab} is another vocabulary (md5 {job.words.md5}){again}")
    check_config(inputs, job.words, job.config)
    for path in inputs.others:
        if any(name.startswith("phase1/") for name in wrong) and (
            made.files.get(f"phase1/{path.name}") != manifest.md5_of(path)
        ):
            raise DataError(f"{path} is another configuration{again}")
    training = any(name in made.records for name in wrong)
    evaluation = any(name in made.evaluation for name in wrong)
    texts = [*(inputs.texts if training else ()), *([inputs.eval_text] if training or evaluation else [])]
    texts = [path for path in texts if not job.limit or path.name in made.texts]
    for name, md5 in contents_of(texts, "check text", options.jobs).items():
        if made.texts.get(name) != md5:
            raise DataError(f"{name} in {inputs.eval_text.parent} is another text (md5 {md5}){again}")
    if training:
        needs = needs_of(inputs.sizes, job.config, options.jobs, sequences=job.limit)
        check_needs(dataclasses.replace(needs, disk=needs.disk / 2), folder, "work")
    return job


def _recorded(options: argparse.Namespace, folder: Path, made: Manifest) -> argparse.Namespace:
    """The options of a manifest.

    Raises:
        DataError: another value of one was given.
    """
    recipe = {"do_lower_case": True, **made.recipe}  # as before there was a choice
    edges = recipe.get("edges")
    recorded = {name: recipe.get(name) for name in _OPTIONS} | {"edges": tuple(edges) if edges else None}  # type: ignore[arg-type]
    for name, default in options.defaults.items():
        given = getattr(options, name)
        if given not in (default, recorded[name]):
            flag = f"--{name.replace('_', '-')}"
            raise DataError(f"{folder} was prepared with {flag} {recorded[name]}, not {given}; leave {flag} out")
    kind = recipe["kind"]
    return argparse.Namespace(
        **{
            **vars(options), **recorded, "outputdir": folder, "downloaddir": download_folder(options),
            "packed_data": kind == "packed", "binned_data": kind == "binned", "phases": recipe.get("folder") or None,
        }
    )  # fmt: skip


def defaults_of(parser: argparse.ArgumentParser) -> dict[str, object]:
    """The defaults of the options that a manifest records, by which one that was given is known."""
    return {name: parser.get_default(name) for name in _OPTIONS}


def _make_again(job: Job, made: Manifest, wrong: list[str]) -> None:
    """Makes these files again; the others stay."""
    for name in made.records:
        if name in wrong:  # a shard of the right source would be taken for finished
            (job.outputdir / name).unlink(missing_ok=True)
    if any(name.startswith("phase1/") for name in wrong):
        fill_phase1(job)
    training = any(name in made.records for name in wrong)
    if training:
        make_all_instances(job)
    elif any(name in made.evaluation for name in wrong):
        make_evaluation_instances(job)
    if any(name in made.evaluation for name in wrong):
        make_evaluation_set(job)
    if training:
        make_training_files(job)
    job.inputs.check_unchanged()
