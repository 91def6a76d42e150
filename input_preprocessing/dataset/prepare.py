"""Prepares a data set for training, from the benchmark's public files or your own text.

Steps: download (with --skip-download the files are already in DOWNLOADDIR), instances (tokenise, pair, mask) of every
text shard and of eval.txt, evaluation set, and packed rows or shuffled or binned sequences. If DOWNLOADDIR/wiki has
Wikipedia dumps (*.xml.bz2) and there is no text yet, the text is first made from them. Writes to OUTPUTDIR:
  packed_data/part_XXXXX_of_XXXXX.hdf5              with --packed-data
  hdf5/bins/{128,256,384,512}/part_...              with --binned-data
  hdf5/training-SHARDS/part_XXXXX_of_XXXXX.hdf5     without either
  eval/part_eval_10k.hdf5
  phase1/                                           vocab.txt, bert_config.json, and model.ckpt-28252.pt if available
  prepared-{packed,binned,unpacked}.json            manifest: what was made from what
  DATA_CARD.md                                      the same, readable
With --phases it writes all this to OUTPUTDIR/128 and OUTPUTDIR/512, from the same text, for run_pretraining.sh;
shuffled sequences are then in hdf5/training. With --input, the text in DOWNLOADDIR is first made from your own files.
Work files are in OUTPUTDIR/work until the end. It can be stopped at any moment, even by kill -9, and run again:
finished files are kept, and the result is byte-identical to that of an uninterrupted run, whatever --jobs. --repair
finds files that were damaged later and remakes them, with the options recorded in prepared-*.json.

On a cluster, prepare_data.sub runs it with --only start, then with --only instances and --only shards on every node,
each with its own --part, and finally without --only to finish.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from bert.data.format import open_records
from bert.data.records import DataError
from common.durations import duration
from input_preprocessing.dataset import data_card, download, repair, steps
from input_preprocessing.instances.options import SamplingConfig, sampling_config
from input_preprocessing.records.shards import check_target
from input_preprocessing.stage import cli, manifest
from input_preprocessing.text import corpus, vocabulary
from input_preprocessing.wiki import wikipedia

_OUTPUTS = ("work", "packed_data", "hdf5", "eval")


def start(options: argparse.Namespace) -> steps.Job | None:
    """Downloads, checks inputs and prints the needs; returns None if everything is up to date.

    Raises:
        DataError: an input is missing or wrong, or the disk is too small.
    """
    config = sampling_config(options)
    outputdir: Path = options.outputdir
    folder = steps.download_folder(options)
    share = 1 + options.phases_after / 2  # the shards of each later phase take half the disk
    # On a cluster `--only start` makes the text, once for all nodes.
    if options.only in (None, "start") and wikipedia.text_is_wanted(folder, options.jobs):
        wikipedia.make_text(folder, outputdir / "work" / "wiki", jobs=options.jobs)
    if not (options.skip_download or options.input):
        if not (folder / "results4").is_dir():
            outputdir.mkdir(parents=True, exist_ok=True)
            # By the published sizes, before hours of downloading.
            needs = steps.needs_of(
                steps.PUBLIC_SIZES, config, options.jobs, share=share, download=steps.PUBLIC_BYTES
            )
            steps.check_needs(needs, outputdir, "download", *_OUTPUTS)
        download.download(folder, options.mirror)
    inputs = steps.find_inputs(folder, outputdir / "phase1", options.vocab_file)
    job = steps.Job(
        options=options, config=config, inputs=inputs, words=vocabulary.load(inputs.vocab)
    )
    steps.check_config(inputs, job.words, config)
    if job.is_finished():
        if options.only in (
            None,
            "start",
        ):  # model sizes, checkpoint or license may be new or replaced
            made = manifest.read(job.manifest)
            files = {
                str(path.relative_to(outputdir)): manifest.md5_of(path)
                for path in job.fill_phase1()
            }
            license = made.license if options.license is None else options.license
            if files.items() - made.files.items() or license != made.license:
                made = dataclasses.replace(made, files={**made.files, **files}, license=license)
                manifest.write(job.manifest, made)
            data_card.write(outputdir)
        done = f"{outputdir} is already prepared ({job.manifest.name}); nothing to do"
        print(f"{done} (--repair reads and compares every file)", file=sys.stderr)
        return None
    if options.only in (None, "start"):
        outputdir.mkdir(parents=True, exist_ok=True)
        # Check before hours of work that no other files are in the way of the shards, and that the bins' lengths fit.
        unpacked = steps.UNPACKED_FOLDER if options.phases else f"training-{options.shards or '*'}"
        folders = {"packed": ["packed_data"], "unpacked": [f"hdf5/{unpacked}"]}
        for pattern in folders.get(job.kind, [f"hdf5/bins/{edge}" for edge in job.edges]):
            for target in outputdir.glob(pattern):
                check_target(target)
        needs = steps.needs_of(inputs.sizes, config, options.jobs, options.part[1], share=share)
        steps.check_needs(needs, outputdir, *_OUTPUTS)
        job.words.check_case(config.do_lower_case)
        if job.manifest.exists():
            print(
                f"{job.manifest} has other inputs or options: making its files again",
                file=sys.stderr,
            )
            job.manifest.unlink()
    return job


def finish(job: steps.Job) -> None:
    """Makes everything that is missing, checks the result and writes the manifest."""
    started = time.monotonic()
    options = job.options
    # First what takes little time and may fail, such as a checkpoint of another model.
    others = job.fill_phase1()
    texts = steps.make_instances(job)
    eval_file, picked = steps.make_evaluation_set(job)
    target, digest = steps.make_training_files(job)
    # A text that was still being copied must not be recorded as prepared.
    job.inputs.check_unchanged()
    files = {str(path.relative_to(job.outputdir)): manifest.md5_of(path) for path in others}
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
    made = manifest.Manifest(
        text=f"{sequences:,} sequences in {rows:,} rows, {tokens / capacity:.2%} full, {len(shard_files)} shards",
        sequences=sequences, rows=rows, tokens=tokens, eval_samples=picked, multiset_digest=digest, texts=texts,
        recipe=job.recipe(), files=files, license=options.license or "", versions=manifest.versions(),
        sources=sources,
    )  # fmt: skip
    manifest.write(job.manifest, made)
    data_card.write(job.outputdir)
    print(
        f"{target}: {made.text}; done in {duration(time.monotonic() - started)}",
        file=sys.stderr,
    )


def split_phases(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Options of each phase's preparation; without --phases, of the only one.

    Only the first one downloads. `phases_after`: number of phases that follow, for the disk estimate.

    Raises:
        DataError: the lengths are given twice.
    """
    if options.phases is None:
        return [argparse.Namespace(**vars(options), phases_after=0)]
    default = SamplingConfig()
    for name in ("max_seq_length", "max_predictions_per_seq"):
        if getattr(options, name) != getattr(default, name):
            raise DataError(f"--phases sets the sequence lengths: omit --{name.replace('_', '-')}")
    outputdir: Path = options.outputdir
    common = {**vars(options), "downloaddir": options.downloaddir or outputdir / "download"}
    parts = []
    for number, (length, masked) in enumerate(options.phases):
        own = {
            "outputdir": outputdir / str(length),
            "max_seq_length": length,
            "max_predictions_per_seq": masked,
        }
        own |= {
            "skip_download": options.skip_download or number > 0,
            "phases_after": len(options.phases) - 1 - number,
        }
        parts.append(argparse.Namespace(**(common | own)))
    return parts


def main(options: argparse.Namespace) -> None:
    # Runs all steps, or that of --only, of every phase, after all possible checks.
    if options.json and not options.repair:
        raise DataError("--json requires --repair")
    with ExitStack() as locks:
        if options.repair:
            for name in ("only", "input", "mirror"):
                if getattr(options, name):
                    raise DataError(
                        f"--repair remakes files on one machine from DOWNLOADDIR: omit --{name}"
                    )
            folders = [options.outputdir, *(path.parent for path in repair.find_manifests(options))]
            for folder in dict.fromkeys(folders):
                locks.enter_context(cli.lock_folder(folder, exclusive=True))
            report = repair.repair(options)
            if options.json:
                print(json.dumps(report))
            return
        only, whole = options.only, options.only in (None, "start")
        parts = split_phases(options)
        for folder in dict.fromkeys([options.outputdir, *(part.outputdir for part in parts)]):
            locks.enter_context(cli.lock_folder(folder, exclusive=whole))
        if not options.input:
            default = cli.parser_of("text").get_default
            given = [
                name for name in corpus.TEXT_OPTIONS if getattr(options, name) != default(name)
            ]
            if given:
                raise DataError(f"--{given[0].replace('_', '-')} requires --input")
        elif whole:
            # The phases share text and model, which needs positions for the longest.
            longest = options.phases[-1][0] if options.phases else options.max_seq_length
            text = argparse.Namespace(**{**vars(options), "max_seq_length": longest})
            corpus.make(text, steps.download_folder(options))
        # All phases are checked before the first one works for hours.
        for part, job in zip(parts, [start(part) for part in parts], strict=True):
            if job and only == "start":
                job.fill_phase1()
            elif job and only == "instances":
                steps.make_instances(job, options.part)
            elif job and only == "shards":
                steps.make_training_files(job, options.part)
            elif job:
                finish(job)
            if only is None:  # before the next phase needs the space
                shutil.rmtree(part.outputdir / "work", ignore_errors=True)
