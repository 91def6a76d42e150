"""Prepares a data set for training, from the benchmark's public files or your own text.

Steps: download (with --skip-download the files are already in DOWNLOADDIR), instances (tokenise,
pair, mask) of every text shard and of eval.txt, evaluation set, and packed rows or shuffled or
binned sequences. Writes to OUTPUTDIR:
  packed_data/part_XXXXX_of_XXXXX.hdf5              with --packed-data
  hdf5/bins/{128,256,384,512}/part_...              with --binned-data
  hdf5/training-SHARDS/part_XXXXX_of_XXXXX.hdf5     without either
  eval/part_eval_10k.hdf5
  phase1/                                           vocab.txt, bert_config.json, and, if available,
                                                    model.ckpt-28252.pt
  prepared-{packed,binned,unpacked}.json            manifest: what was made from what
With --phases it writes all this to OUTPUTDIR/128 and OUTPUTDIR/512, from the same text, for
run_pretraining.sh; shuffled sequences are then in hdf5/training. With --input, the text in
DOWNLOADDIR is first made from your own files.
Work files are in OUTPUTDIR/work until the end. It can be stopped at any moment, even by kill -9,
and run again: finished files are kept, and the result is byte-identical to that of an uninterrupted
run, whatever --jobs. --repair finds files that were damaged later and remakes them, with the
options recorded in prepared-*.json.
"""

import argparse
import dataclasses
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

from bert.data import prepared
from bert.data.format import open_records
from bert.data.records import DataError
from common.durations import duration
from input_preprocessing.dataset import download, repair, steps
from input_preprocessing.instances.options import SamplingConfig, sampling_config
from input_preprocessing.records.sharding import check_target
from input_preprocessing.stage import cli, manifest
from input_preprocessing.stage.cli import say
from input_preprocessing.text import corpus, vocabulary


def start(options: argparse.Namespace) -> steps.Job | None:
    """Downloads, and checks inputs and disk; returns None if everything is up to date.

    Raises:
        DataError: an input is missing or wrong, or the disk is too small.
    """
    config = sampling_config(options)
    outputdir: Path = options.outputdir
    folder = steps.download_folder(options)
    # The shards of each later phase take half the disk.
    share = 1 + options.phases_after / 2
    if not (options.skip_download or options.input):
        if not (folder / "results4").is_dir():
            # By the published sizes, before hours of downloading.
            steps.check_disk(
                outputdir,
                steps.PUBLIC_TEXT,
                config,
                share=share,
                download=steps.PUBLIC_BYTES,
            )
        download.download(folder, options.mirror)
    inputs = steps.find_inputs(folder, outputdir / "phase1", options.vocab_file)
    words = vocabulary.load(inputs.vocab)
    job = steps.Job(options=options, config=config, inputs=inputs, words=words)
    steps.check_config(inputs, words, config)
    if job.is_finished():
        made = prepared.read(job.manifest)
        # Model sizes or checkpoint may be new or replaced.
        files = made.files | job.digests_of(job.fill_phase1())
        if files != made.files:
            prepared.write(job.manifest, dataclasses.replace(made, files=files))
        done = f"{outputdir} is already prepared ({job.manifest.name}); nothing to do"
        say(f"{done} (--repair reads and compares every file)")
        return None
    # Before hours of work: no other files are in the way of the shards, and the bins' lengths fit.
    unpacked = (
        steps.UNPACKED_FOLDER if options.phases else f"training-{options.shards or '*'}"
    )
    folders = {"packed": ["packed_data"], "unpacked": [f"hdf5/{unpacked}"]}
    for pattern in folders.get(job.kind, [f"hdf5/bins/{edge}" for edge in job.edges]):
        for target in outputdir.glob(pattern):
            check_target(target)
    steps.check_disk(outputdir, sum(inputs.sizes), config, share=share)
    words.check_case(config.do_lower_case)
    if job.manifest.exists():
        say(f"{job.manifest} has other inputs or options: making its files again")
        job.manifest.unlink()
    return job


def finish(job: steps.Job) -> None:
    """Makes everything that is missing, checks the result and writes the manifest."""
    started = time.monotonic()
    # First what takes little time and may fail, such as a checkpoint of another model.
    others = job.fill_phase1()
    texts = steps.make_instances(job)
    eval_file, picked = steps.make_evaluation_set(job)
    target, digest = steps.make_training_files(job)
    # A text that was still being copied must not be recorded as prepared.
    job.inputs.check_unchanged()
    files = job.digests_of(others)
    sources: dict[str, list[list[str]]] = {}
    sequences = rows = tokens = capacity = 0
    shard_files = sorted(target.rglob("part_*.hdf5"))
    for path in (eval_file, *shard_files):  # written or verified by this process
        records, metadata = open_records(path)
        name = path.relative_to(job.outputdir)
        files[str(name)] = metadata.content_digest
        sources[str(name.parent)] = [list(each) for each in metadata.source]
        if path != eval_file:
            sequences += records.num_sequences
            rows += records.num_rows
            tokens += len(records.input_ids)
            capacity += records.num_rows * metadata.max_seq_length
    made = prepared.Manifest(
        text=f"{sequences:,} sequences in {rows:,} rows, {tokens / capacity:.2%} full, {len(shard_files)} shards",
        sequences=sequences,
        rows=rows,
        tokens=tokens,
        eval_samples=picked,
        multiset_digest=digest,
        texts=texts,
        recipe=job.recipe(),
        files=files,
        versions=manifest.versions(),
        sources=sources,
    )
    prepared.write(job.manifest, made)
    say(f"{target}: {made.text}; done in {duration(time.monotonic() - started)}")


def split_phases(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Options of each phase's preparation; without --phases, of the only one.

    Only the first one downloads. `phases_after`: number of phases that follow, for the disk
    estimate.

    Raises:
        DataError: the lengths are given twice.
    """
    if options.phases is None:
        return [argparse.Namespace(**vars(options), phases_after=0)]
    default = SamplingConfig()
    for name in ("max_seq_length", "max_predictions_per_seq"):
        if getattr(options, name) != getattr(default, name):
            raise DataError(
                f"--phases sets the sequence lengths: omit --{name.replace('_', '-')}"
            )
    folder: Path = options.outputdir
    return [
        argparse.Namespace(
            **{
                **vars(options),
                "downloaddir": steps.download_folder(options),
                "outputdir": folder / str(length),
                "max_seq_length": length,
                "max_predictions_per_seq": masked,
                "skip_download": options.skip_download or number > 0,
                "phases_after": len(options.phases) - 1 - number,
            }
        )
        for number, (length, masked) in enumerate(options.phases)
    ]


def main(options: argparse.Namespace) -> None:
    with ExitStack() as locks:
        if options.repair:
            folders = [path.parent for path in repair.find_manifests(options.outputdir)]
            for folder in dict.fromkeys([options.outputdir, *folders]):
                locks.enter_context(cli.lock_folder(folder))
            repair.repair(options)
            return
        parts = split_phases(options)
        for folder in dict.fromkeys(
            [options.outputdir, *(part.outputdir for part in parts)]
        ):
            locks.enter_context(cli.lock_folder(folder))
        if options.input:
            # The phases share text and model, which needs positions for the longest.
            longest = (
                options.phases[-1][0] if options.phases else options.max_seq_length
            )
            text = argparse.Namespace(**{**vars(options), "max_seq_length": longest})
            corpus.make(text, steps.download_folder(options))
        else:
            default = cli.parser_of("text").get_default
            for name in corpus.TEXT_OPTIONS:
                if getattr(options, name) != default(name):
                    raise DataError(f"--{name.replace('_', '-')} requires --input")
        # All phases are checked before the first one works for hours.
        for part, job in zip(parts, [start(part) for part in parts], strict=True):
            if job:
                finish(job)
            # Before the next phase needs the space.
            shutil.rmtree(part.outputdir / "work", ignore_errors=True)
