"""Prepares the data set: from the benchmark's public files, or your own text, to records that train.

Steps: download (unless --skip-download: then the files are already in DOWNLOADDIR), instances (tokenise, pair, mask) of
every text shard and of eval.txt, evaluation set, packed rows, shuffled or binned sequences. Where DOWNLOADDIR/wiki has
Wikipedia dumps (*.xml.bz2) and there is no text yet, the text is first made of them. Writes to OUTPUTDIR:
  packed_data/part_XXXXX_of_XXXXX.hdf5              with --packed-data
  hdf5/bins/{128,256,384,512}/part_...              with --binned-data
  hdf5/training-SHARDS/part_XXXXX_of_XXXXX.hdf5     without either
  eval/part_eval_10k.hdf5
  phase1/                                           vocab.txt, bert_config.json, model.ckpt-28252.pt where it is known
  prepared-{packed,binned,unpacked}.json            what was made, and of what
  DATA_CARD.md                                      the same for people
With --phases it writes all this to OUTPUTDIR/128 and OUTPUTDIR/512, of one text: what run_pretraining.sh trains on.
Shuffled sequences are then in hdf5/training. With --input, the text in DOWNLOADDIR is first made of files of your own.
Work files are under OUTPUTDIR/work until the end. Stop it at any moment, kill -9 included, and run it again: finished
files are kept, and the result equals an uninterrupted run byte for byte, whatever --jobs. What was damaged later,
--repair finds and makes again, with the options that prepared-*.json has; other options are not needed then.

On a cluster, prepare_data.sub runs it with --only start, then with --only instances and --only shards on every node,
each with its own --part, and at last without, which finds all that finished.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from bert.data.records import DataError
from input_preprocessing.dataset import data_card, download, phases, repair
from input_preprocessing.dataset.inputs import (
    Needs,
    check_config,
    check_needs,
    find_inputs,
    needs_of,
    public_needs,
)
from input_preprocessing.dataset.job import Job
from input_preprocessing.dataset.steps import (
    download_folder,
    fill_phase1,
    make_evaluation_set,
    make_training_files,
)
from input_preprocessing.dataset.texts import make_all_instances
from input_preprocessing.instances.options import add_sampling_options, sampling_config
from input_preprocessing.records import bins, evalset
from input_preprocessing.records.deal import check_target
from input_preprocessing.stage import manifest
from input_preprocessing.stage.cli import (
    add_jobs,
    human_time,
    lock_folder,
    named_folder,
    part_of,
    positive,
    run,
    stage_parser,
)
from input_preprocessing.text import corpus, vocabulary
from input_preprocessing.wiki import wikipedia

_OUTPUTS = ("work", "packed_data", "hdf5", "eval")


def refresh(job: Job) -> None:
    """Brings model sizes, checkpoint and license up to date that came, or were replaced, after the set was finished."""
    made = manifest.read(job.manifest)
    files = {str(path.relative_to(job.outputdir)): manifest.digest_of(path) for path in fill_phase1(job)}
    license = made.license if job.options.license is None else job.options.license
    if files.items() - made.files.items() or license != made.license:
        manifest.write(job.manifest, dataclasses.replace(made, files={**made.files, **files}, license=license))
    data_card.write(job.outputdir)


def start(options: argparse.Namespace) -> Job | None:
    """Downloads, checks all that can be checked and announces what it will take; None: all was made before.

    Raises:
        DataError: an input is missing or wrong, or the disk is too small.
    """
    config = sampling_config(options)
    outputdir: Path = options.outputdir
    folder = download_folder(options)
    if options.only in (None, "start") and wikipedia.text_is_wanted(folder):
        wikipedia.make_text(folder, outputdir / "work" / "wiki", jobs=options.jobs)
    if not (options.skip_download or options.input):
        if not (folder / "results4").is_dir():
            outputdir.mkdir(parents=True, exist_ok=True)
            check_needs(
                _with_later(public_needs(config, options.jobs, options.sequences), options),
                outputdir,
                "download",
                *_OUTPUTS,
            )
        download.download(folder, options.mirror)
    inputs = find_inputs(folder, outputdir / "phase1", options.vocab_file)
    job = Job(options=options, config=config, inputs=inputs, words=vocabulary.load(inputs.vocab))
    check_config(inputs, job.words, config)
    if job.is_finished():
        if options.only in (None, "start"):
            refresh(job)
        done = f"{outputdir} is prepared already ({job.manifest.name}); nothing to do"
        print(f"{done} (--repair reads every file and compares)", file=sys.stderr)
        return None
    if options.only in (None, "start"):
        outputdir.mkdir(parents=True, exist_ok=True)
        _check_targets(job)
        needs = needs_of(inputs.sizes, config, options.jobs, options.part[1], options.sequences)
        check_needs(_with_later(needs, options), outputdir, *_OUTPUTS)
        job.words.check_case(config.do_lower_case)
        job.manifest.unlink(missing_ok=True)
    return job


def _with_later(needs: Needs, options: argparse.Namespace) -> Needs:
    """The needs, and the disk for the shards of the phases that follow: half of what one's work takes, each."""
    return dataclasses.replace(needs, disk=needs.disk + options.phases_after * (needs.disk - needs.download) / 2)


def _check_targets(job: Job) -> None:
    """Checks, before hours of work, that no files of others are where the shards will be, and the bins' lengths.

    Raises:
        DataError: there are, or the lengths do not suit.
    """
    unpacked = f"hdf5/{phases.FOLDER}" if job.options.phases else f"hdf5/training-{job.options.shards or '*'}"
    folders = {"packed": ["packed_data"], "unpacked": [unpacked], "binned": [f"hdf5/bins/{edge}" for edge in job.edges]}
    for folder in (path for pattern in folders[job.kind] for path in job.outputdir.glob(pattern)):
        check_target(folder)


def finish(job: Job) -> None:
    """Makes all that is not there yet, checks the whole and writes the manifest."""
    started = time.monotonic()
    options = job.options
    others = fill_phase1(job)
    texts = make_all_instances(job)
    eval_file, picked = make_evaluation_set(job)
    target, digest = make_training_files(job)
    job.inputs.check_unchanged()
    made = manifest.summarise(
        job.outputdir,
        sorted(target.rglob("part_*.hdf5")),
        [*others, eval_file],
        eval_samples=picked,
        multiset_digest=digest,
        texts=texts,
        recipe=job.recipe(),
        license=options.license or "",
    )
    manifest.write(job.manifest, made)
    data_card.write(job.outputdir)
    print(f"{target}: {made.text}; done in {human_time(time.monotonic() - started)}", file=sys.stderr)


def prepare(options: argparse.Namespace) -> None:
    """Runs all steps, or the one of --only, of every phase; all that can be checked is checked before the first."""
    if options.repair or options.json:
        return _repair(options)
    whole = options.only in (None, "start")
    with ExitStack() as locks:
        parts = phases.split(options)
        for folder in dict.fromkeys([options.outputdir, *(part.outputdir for part in parts)]):
            locks.enter_context(lock_folder(folder, exclusive=whole))
        _make_text(options, whole)
        jobs = [start(part) for part in parts]
        for part, job in zip(parts, jobs, strict=True):
            if job:
                _run(job)
            if options.only is None:  # before the next phase needs the room
                shutil.rmtree(part.outputdir / "work", ignore_errors=True)


def _repair(options: argparse.Namespace) -> None:
    """Finds and mends what is wrong with finished data sets, and prints a report where it is asked for.

    Raises:
        DataError: an option has no place here, or a file cannot be mended.
    """
    if not options.repair:
        raise DataError("--json is the report of --repair; give both or neither")
    for name in ("only", "input", "mirror"):
        if getattr(options, name):
            raise DataError(
                f"--repair makes files again, on one machine, of what is in DOWNLOADDIR: leave --{name} out"
            )
    with ExitStack() as locks:
        for folder in dict.fromkeys([options.outputdir, *(path.parent for path in repair.find_manifests(options))]):
            locks.enter_context(lock_folder(folder, exclusive=True))
        report = repair.repair(options)
    if options.json:
        print(report.to_json(options.outputdir))


def _run(job: Job) -> None:
    """The steps wanted of a preparation."""
    only, part = job.options.only, job.options.part
    if only == "start":
        fill_phase1(job)
    elif only == "instances":
        make_all_instances(job, part)
    elif only == "shards":
        make_training_files(job, part)
    else:
        finish(job)


def _make_text(options: argparse.Namespace, wanted: bool) -> None:
    """Makes the text of a preparation of --input.

    Raises:
        DataError: it cannot be read, or options of it are given without it.
    """
    if not options.input:
        given = [name for name, value in corpus.TEXT_OPTIONS.items() if getattr(options, name) != value]
        if given:
            raise DataError(f"--{given[0].replace('_', '-')} is about the text of --input, and there is none")
    elif wanted:
        text = argparse.Namespace(**{**vars(options), "max_seq_length": phases.longest(options)})
        corpus.make(text, download_folder(options))


def make_parser() -> argparse.ArgumentParser:
    """The command line's options."""
    parser = stage_parser("prepare", __doc__)
    parser.add_argument("--outputdir", type=named_folder, required=True, help="folder of the data set")
    phases.add_phases(parser)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--packed-data", action="store_true", help="make packed rows (default: shuffled sequences)")
    kind.add_argument("--binned-data", action="store_true", help="make bins of sequences of similar length")
    parser.add_argument("--skip-download", action="store_true", help="use what is in DOWNLOADDIR")
    parser.add_argument("--downloaddir", type=named_folder, help="of the input files (default: OUTPUTDIR/download)")
    parser.add_argument("--mirror", help="URL or folder to download from (default: the benchmark's public places)")
    parser.add_argument("--shards", type=positive, help="shards to write (default: by size, at most 4320)")
    parser.add_argument("--vocab-file", type=Path, help="(default: vocab.txt in OUTPUTDIR/phase1 or DOWNLOADDIR)")
    parser.add_argument(
        "--max-sequences-per-row", type=positive, default=3, help="of packed data (default %(default)s)"
    )
    bins.add_edges(parser)
    parser.add_argument("--sequences", type=positive, help="training sequences to prepare at most (default: all)")
    parser.add_argument("--num-eval-samples", type=positive, default=evalset.NUM_SAMPLES, help="(default %(default)s)")
    parser.add_argument("--only", choices=("start", "instances", "shards"), help="one step, on one of many nodes")
    parser.add_argument("--part", type=part_of, default=(0, 1), help="I/N: this node's number, from 0, of N")
    data_card.add_license(parser)
    parser.add_argument("--repair", action="store_true", help="find what is wrong in OUTPUTDIR, make again only that")
    parser.add_argument("--json", action="store_true", help="print the report of --repair as JSON")
    add_sampling_options(parser)
    add_jobs(parser)
    text = parser.add_argument_group("a text of your own (python -m input_preprocessing.corpus --help)")
    text.add_argument("--input", nargs="+", help="files or folders of text, or 'pydoc'")
    corpus.add_text_options(text)
    parser.set_defaults(defaults=repair.defaults_of(parser))
    return parser


def main() -> None:
    """Command line."""
    run(make_parser(), prepare)
