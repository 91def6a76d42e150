"""The steps of a preparation that make its files, each of which keeps what is there already."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bert.data.format import open_records
from bert.data.records import DataError
from input_preprocessing.dataset import phase1, phases
from input_preprocessing.dataset.job import Job
from input_preprocessing.records import bins, evalset
from input_preprocessing.records.deal import num_shards
from input_preprocessing.records.pack import pack_records
from input_preprocessing.records.shuffle import shuffle_records


def make_training_files(job: Job, part: tuple[int, int] = (0, 1)) -> tuple[Path, str]:
    """Packed, binned or shuffled shards of all instances; their folder and their multiset digest.

    Raises:
        DataError: instances are missing, or too few for the shards wanted.
    """
    sources = job.instances_of_texts
    if job.limit:
        sources = [path for path in sources if path.exists()]
    missing = [path for path in sources if not path.is_file()]
    if missing:
        raise DataError(f"{missing[0]} is missing; run --only instances for every part first")
    options, seed, jobs = job.options, job.config.random_seed, job.options.jobs
    if job.kind == "binned":
        target = job.outputdir / "hdf5" / "bins"
        digest = bins.bin_records(
            job.instances, target, edges=job.edges, shards=options.shards, seed=seed, jobs=jobs, part=part
        )
        return target, digest
    shards = num_shards(sum(open_records(path)[0].num_sequences for path in sources), options.shards)
    if job.kind == "unpacked":
        target = job.outputdir / "hdf5" / (phases.FOLDER if options.phases else f"training-{shards}")
        return target, shuffle_records(job.instances, target, shards=shards, seed=seed, jobs=jobs, part=part)
    target, rows = job.outputdir / "packed_data", options.max_sequences_per_row
    digest = pack_records(
        job.instances, target, shards=shards, seed=seed, max_sequences_per_row=rows, jobs=jobs, part=part
    )
    return target, digest


def fill_phase1(job: Job) -> list[Path]:
    """Vocabulary, model sizes and the checkpoint converted; the files."""
    return phase1.fill(
        job.outputdir / "phase1", job.inputs, download_folder(job.options), job.words.md5, job.config.do_lower_case
    )


def download_folder(options: argparse.Namespace) -> Path:
    """DOWNLOADDIR."""
    folder: Path = options.downloaddir or options.outputdir / "download"
    return folder


def make_evaluation_set(job: Job) -> tuple[Path, int]:
    """Picks the evaluation samples of the instances of the evaluation text; the file, and how many they are."""
    eval_file = job.outputdir / "eval" / "part_eval_10k.hdf5"
    eval_file.parent.mkdir(exist_ok=True)
    wanted = job.options.num_eval_samples
    picked = evalset.pick_samples(job.eval_instances, eval_file, wanted)
    print(evalset.report(eval_file, picked, wanted), file=sys.stderr)
    return eval_file, picked
