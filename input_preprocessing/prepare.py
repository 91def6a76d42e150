"""Prepares the data set: from the benchmark's public files, or your own text, to records that train.

Steps: download (unless --skip-download: then the files are already under OUTPUTDIR/download), instances (tokenise,
pair, mask) of every text shard and of eval.txt, evaluation set, packed rows or shuffled sequences. Writes to OUTPUTDIR:
  packed_data/part_XXXXX_of_XXXXX.hdf5              with --packed-data
  hdf5/training-SHARDS/part_XXXXX_of_XXXXX.hdf5     without
  eval/part_eval_10k.hdf5
  phase1/                                           vocab.txt, bert_config.json, model.ckpt-28252.pt where it is known
  prepared-packed.json or prepared-unpacked.json    what was made, and of what
Work files are under OUTPUTDIR/work until the end. Stop it at any moment, kill -9 included, and run it again: finished
files are kept, and the result is byte for byte that of an uninterrupted run, whatever --jobs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bert.data.format import DataError, atomic_file, open_records

from . import download, evalset, vocabulary
from .cli import add_jobs, human_bytes, human_time, positive, run, stage_parser
from .convert_checkpoint import convert
from .deal import num_shards
from .instances import add_sampling_options, sampling_config, sampling_digest, write_instances
from .pack import pack_records
from .parallel import run_tasks
from .sampling import SamplingConfig
from .shuffle import shuffle_records
from .vocabulary import Vocabulary

CHECKPOINT = "model.ckpt-28252"

# Measured on English Wikipedia with the benchmark's options; for the estimate only.
_RECORD_BYTES_PER_TEXT_BYTE = 0.85  # for each time the text is duplicated
_TEXT_BYTES_PER_SECOND = 4e6  # all steps, one process, dupe_factor 10
_WORKER_BYTES = 1.5e9  # at most; text shards of 27 MB


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The files under OUTPUTDIR/download."""

    texts: tuple[Path, ...]
    eval_text: Path
    vocab: Path
    others: tuple[Path, ...]  # copied to phase1 as they are

    @property
    def text_bytes(self) -> int:
        """Size of the training and evaluation text."""
        return sum(path.stat().st_size for path in (*self.texts, self.eval_text))


def find_inputs(outputdir: Path, vocab_file: Path | None) -> Inputs:
    """The input files.

    Raises:
        DataError: one is missing, or part files of several sets are mixed.
    """
    download = outputdir / "download"
    folder = download / "results4"
    texts = sorted(path for path in folder.glob("part-*-of-*") if path.is_file())
    if not texts:
        raise DataError(
            f"no text {folder}/part-XXXXX-of-XXXXX; download the data, or make it of your own text with "
            f"python -m input_preprocessing.corpus --outputdir {outputdir} --input FILE"
        )
    wanted = [f"part-{i:05d}-of-{len(texts):05d}" for i in range(len(texts))]
    odd = sorted(set(wanted) ^ {path.name for path in texts})
    if odd:
        raise DataError(f"{folder} is incomplete or mixed, see {odd[0]}; it needs {wanted[0]} to {wanted[-1]} only")
    found = [path for path in (folder / "eval.txt", download / "eval.txt") if path.is_file()]
    if not found:
        raise DataError(f"no evaluation text {folder}/eval.txt; download it or see input_preprocessing.corpus")
    places = [outputdir / "phase1", download, folder]
    vocab = vocab_file or next((p / "vocab.txt" for p in places if (p / "vocab.txt").is_file()), None)
    if vocab is None:
        raise DataError(f"no vocab.txt in {outputdir}/phase1 or {download}; put it there or give --vocab-file")
    config = next((p / "bert_config.json" for p in places if (p / "bert_config.json").is_file()), None)
    return Inputs(texts=tuple(texts), eval_text=found[0], vocab=vocab, others=(config,) if config else ())


def _make_instances(task: tuple[Path, Path, Vocabulary, SamplingConfig]) -> int:
    """Writes the instances of a text unless they are there already; their number."""
    source, target, words, config = task
    try:
        records, metadata = open_records(target)
        made_of = (source.name, hashlib.md5(source.read_bytes()).hexdigest()), ("sampling", sampling_digest(config))
        if metadata.source == made_of and metadata.vocab_md5 == words.md5:
            return records.num_sequences
    except DataError:
        pass
    return write_instances(source, target, words, config)[0]


def make_all_instances(inputs: Inputs, work: Path, words: Vocabulary, config: SamplingConfig, jobs: int) -> int:
    """Instances of every text shard in work/instances and of the evaluation text in work/eval; number of the former.

    Raises:
        DataError: the text holds nothing.
    """
    targets = [work / "instances" / f"{path.name}.hdf5" for path in inputs.texts] + [work / "eval" / "eval_all.hdf5"]
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
    stale = set((work / "instances").glob("*.hdf5")) - set(targets)
    for path in stale:
        path.unlink()
    texts = [*inputs.texts, inputs.eval_text]
    tasks = [(text, target, words, config) for text, target in zip(texts, targets, strict=True)]
    weights = [path.stat().st_size for path in texts]
    counts = run_tasks("instances", _make_instances, tasks, jobs=jobs, weights=weights)
    if not sum(counts[:-1]):
        raise DataError(f"the text in {inputs.texts[0].parent} holds no words; check the part files")
    return sum(counts[:-1])


def check_config(inputs: Inputs, words: Vocabulary, config: SamplingConfig) -> None:
    """Checks that the model of bert_config.json takes these tokens and lengths.

    Raises:
        DataError: it does not.
    """
    for path in inputs.others:
        try:
            model = json.loads(path.read_text())
            vocab_size, positions = int(model["vocab_size"]), int(model["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no BERT configuration ({error}); replace it") from error
        if vocab_size < len(words):
            raise DataError(f"{path} has vocab_size {vocab_size}, {inputs.vocab} has {len(words)} tokens; use a pair")
        if positions < config.max_seq_length:
            reason = f"{positions} max_position_embeddings, fewer than --max-seq-length {config.max_seq_length}"
            raise DataError(f"{path} has {reason}; lower the one or replace the other")


def check_space(inputs: Inputs, outputdir: Path, config: SamplingConfig, jobs: int) -> None:
    """Tells what the run will take; stops where the disk is too small.

    Raises:
        DataError: the disk is too small.
    """
    size = inputs.text_bytes
    needed = 2 * size * config.dupe_factor * _RECORD_BYTES_PER_TEXT_BYTE + 10_000_000
    workers = min(jobs, len(inputs.texts) + 1)
    seconds = 10 + size * config.dupe_factor / 10 / _TEXT_BYTES_PER_SECOND / workers
    present = sum(path.stat().st_size for folder in ("work", "packed_data", "hdf5", "eval")
                  for path in (outputdir / folder).rglob("*") if path.is_file())  # fmt: skip
    free = shutil.disk_usage(outputdir).free
    largest = max(path.stat().st_size for path in inputs.texts)
    memory = workers * min(_WORKER_BYTES, 250e6 + 25 * largest)
    print(
        f"{human_bytes(size)} of text in {len(inputs.texts)} files: about {human_bytes(needed)} of disk "
        f"({human_bytes(free)} free), {human_bytes(memory)} of memory and {human_time(seconds)} with {workers} jobs",
        file=sys.stderr,
    )
    if free + present < needed:
        raise DataError(
            f"{outputdir} has {human_bytes(free)} free, about {human_bytes(needed - present)} more are needed; "
            "make room or choose another --outputdir"
        )


def _recipe(inputs: Inputs, words: Vocabulary, options: argparse.Namespace) -> dict[str, object]:
    """All that decides the result, as far as it can be told without reading the text."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in (*inputs.texts, inputs.eval_text)]
    return {
        "texts": hashlib.md5(repr(stats).encode()).hexdigest(),
        "vocab_md5": words.md5,
        **dataclasses.asdict(sampling_config(options)),
        "packed": options.packed_data,
        "shards": options.shards,
        "max_sequences_per_row": options.max_sequences_per_row if options.packed_data else 1,
        "num_eval_samples": options.num_eval_samples,
    }


def _is_prepared(manifest: Path, recipe: dict[str, object]) -> bool:
    """Whether an earlier run made all this, and the files are still there."""
    try:
        made = json.loads(manifest.read_text())
        files = [manifest.parent / name for name in made["files"]]
        return made["recipe"] == recipe and all(path.is_file() for path in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_manifest(manifest: Path, recipe: dict[str, object], files: list[Path], summary: dict[str, object]) -> None:
    names = [str(path.relative_to(manifest.parent)) for path in files]
    with atomic_file(manifest) as partial:
        partial.write_text(json.dumps({**summary, "recipe": recipe, "files": names}, indent=1) + "\n")


def _fill_phase1(inputs: Inputs, outputdir: Path) -> list[Path]:
    """Vocabulary and model sizes as they are, the checkpoint converted; the files."""
    phase1 = outputdir / "phase1"
    phase1.mkdir(exist_ok=True)
    targets = []
    for path in (inputs.vocab, *inputs.others):
        target = phase1 / ("vocab.txt" if path == inputs.vocab else path.name)
        if path.resolve() != target.resolve():
            with atomic_file(target) as partial:
                shutil.copyfile(path, partial)
        targets.append(target)
    checkpoint, converted = outputdir / "download" / CHECKPOINT, phase1 / f"{CHECKPOINT}.pt"
    if Path(f"{checkpoint}.index").is_file() and not converted.is_file():
        print(f"converting {checkpoint} to {converted}", file=sys.stderr)
        convert(checkpoint, converted, "mlperf")
    return [*targets, converted] if converted.is_file() else targets


def prepare(options: argparse.Namespace) -> None:
    """Runs all steps."""
    started = time.monotonic()
    outputdir: Path = options.outputdir
    config = sampling_config(options)
    if not options.skip_download:
        download.download(outputdir, options.mirror)
    inputs = find_inputs(outputdir, options.vocab_file)
    words = vocabulary.load(inputs.vocab)
    check_config(inputs, words, config)
    work = outputdir / "work"
    manifest = outputdir / f"prepared-{'packed' if options.packed_data else 'unpacked'}.json"
    recipe = _recipe(inputs, words, options)
    if _is_prepared(manifest, recipe):
        shutil.rmtree(work, ignore_errors=True)
        print(f"{outputdir} is prepared already ({manifest.name}); nothing to do", file=sys.stderr)
        return
    manifest.unlink(missing_ok=True)
    check_space(inputs, outputdir, config, options.jobs)
    files = _fill_phase1(inputs, outputdir)
    count = make_all_instances(inputs, work, words, config, options.jobs)
    eval_file = outputdir / "eval" / "part_eval_10k.hdf5"
    eval_file.parent.mkdir(exist_ok=True)
    picked = evalset.pick_samples(work / "eval" / "eval_all.hdf5", eval_file, options.num_eval_samples)
    print(evalset.report(eval_file, picked, options.num_eval_samples), file=sys.stderr)
    shards = num_shards(count, options.shards)
    target = outputdir / "packed_data" if options.packed_data else outputdir / "hdf5" / f"training-{shards}"
    if options.packed_data:
        rows = options.max_sequences_per_row
        pack_records(
            work / "instances", target, shards=shards, seed=config.random_seed, max_sequences_per_row=rows,
            jobs=options.jobs,
        )  # fmt: skip
    else:
        shuffle_records(work / "instances", target, shards=shards, seed=config.random_seed, jobs=options.jobs)
    written = sorted(target.glob("part_*.hdf5"))
    summary = _summary(written, picked)
    _write_manifest(manifest, recipe, [*files, eval_file, *written], summary)
    shutil.rmtree(work)
    print(f"{target}: {summary['text']}; done in {human_time(time.monotonic() - started)}", file=sys.stderr)


def _summary(shards: list[Path], eval_samples: int) -> dict[str, object]:
    sequences = rows = tokens = capacity = 0
    for path in shards:
        records, metadata = open_records(path)
        sequences += records.num_sequences
        rows += records.num_rows
        tokens += len(records.input_ids)
        capacity += records.num_rows * metadata.max_seq_length
    text = f"{sequences:,} sequences in {rows:,} rows, {tokens / capacity:.2%} full, {len(shards)} shards"
    return {"text": text, "sequences": sequences, "rows": rows, "tokens": tokens, "eval_samples": eval_samples}


def make_parser() -> argparse.ArgumentParser:
    """The command line's options."""
    parser = stage_parser("prepare", __doc__)
    parser.add_argument("--outputdir", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--packed-data", action="store_true", help="make packed rows (default: shuffled sequences)")
    parser.add_argument("--skip-download", action="store_true", help="use what is in OUTPUTDIR/download")
    parser.add_argument("--mirror", help="URL or folder to download from (default: the benchmark's public places)")
    parser.add_argument("--shards", type=positive, help="shards to write (default: by size, at most 4320)")
    parser.add_argument("--vocab-file", type=Path, help="(default: vocab.txt in OUTPUTDIR/phase1 or /download)")
    parser.add_argument(
        "--max-sequences-per-row", type=positive, default=3, help="of packed data (default %(default)s)"
    )
    parser.add_argument("--num-eval-samples", type=positive, default=evalset.NUM_SAMPLES, help="(default %(default)s)")
    add_sampling_options(parser)
    add_jobs(parser)
    return parser


def main() -> None:
    """Command line."""
    run(make_parser(), prepare)


if __name__ == "__main__":
    main()
