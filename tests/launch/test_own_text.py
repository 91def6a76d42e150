"""From your own text to predictions: the commands of docs/train.md, killed at ten moments."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from ..bert.states import newest, same
from ..held import site
from ..waiting import processes_with, wait_until

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROWS = 9000  # two whole chunks of predictions, and a part of one

# Name -> its command, in a shell in the folder of all output: the commands work from any.
WAY = {
    "prepare": "$REPOSITORY/input_preprocessing/prepare_data.sh --outputdir data --packed-data --nsp 0 --dupe-factor 1 "
    "--max-seq-length 64 --max-predictions-per-seq 10 --input pydoc --vocab-file ../model/vocab.txt --jobs 2",
    "train": "DATADIR=data INIT_CHECKPOINT=../model $REPOSITORY/run_pretraining.sh ../pretrain_mine",
    "export": "python -m bert export results/pretrain_mine -o my-bert",
    "finetune": "$REPOSITORY/run_finetuning.sh glue TASK=table DATA=../table INIT_CHECKPOINT=my-bert RUN_NAME=tuned "
    "CHECKPOINT_DIR=results/tuned/checkpoints CHECKPOINT_EVERY_STEPS=10 RESUME=1 BATCHSIZE=8 LR=1e-3 EPOCHS=8",
    "predict": "python -m finetune predict results/tuned --input ../new.csv --output predicted.csv",
}
MOMENTS = [
    ("prepare", "data/download/corpus/.*.partial"),
    ("prepare", "data/download/results4/part-*"),
    ("prepare", "data/work/*/*.hdf5"),
    ("prepare", "data/packed_data/part_*"),
    ("train", "results/*/phase1/running_0/result_0.txt"),
    ("train", "results/*/phase1/checkpoints/step_*04.pt"),
    ("train", "results/*/phase1/checkpoints/.step_*12.pt.partial"),
    ("export", "my-bert/.*.partial"),
    ("finetune", "results/tuned/checkpoints/seed_*/step_*.pt"),
    ("predict", ".predicted.csv.partial"),
]


def go(folder: Path, repository: Path, moments: list[tuple[str, str]]) -> None:
    """Runs all commands; each is killed at each of its moments, where it stands still, and run again."""
    folder.mkdir()
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder), "MINE": str(folder),
        "REPOSITORY": str(repository), "OMP_NUM_THREADS": "1", "DEVICE": "cpu", "SEED": "1",
    }  # fmt: skip
    modules = f"{repository / 'implementations'}:{repository}"
    for name, command in WAY.items():
        places = [place for stage, place in moments if stage == name]
        for number, pattern in enumerate([*places, ""]):
            held = folder.parent / f"{folder.name}_{name}_{number}"
            if pattern:
                site(held, str(folder / pattern))
            line = ["bash", "-c", f"exec 2>&1; {command}"]
            how = {"cwd": folder, "env": environ | {"PYTHONPATH": f"{held}:{modules}"}}
            process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, **how)
            if pattern:
                stood = held / "stood"
                wait_until(lambda: stood.exists() or process.poll() is not None, 300)  # noqa: B023
                assert stood.exists(), f"{name} ended before {pattern}"
                for number in processes_with(f"MINE={folder}"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
            said = process.communicate(timeout=300)[0]
            assert (process.returncode == 0) == (not pattern), said


def digests(folder: Path, *patterns: str) -> dict[str, str]:
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return {
        str(path.relative_to(folder)): hashlib.md5(path.read_bytes()).hexdigest()
        for path in found
        if path.is_file()
    }


def evaluations(run: Path) -> dict[int, float]:
    """Loss of each evaluation, by step."""
    file = run / "results" / "pretrain_mine" / "phase1" / "metrics_0.jsonl"
    lines = map(json.loads, file.read_text().splitlines())
    return {one["step"]: one["mlm_loss"] for one in lines if one["kind"] == "evaluation"}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, repository: Path) -> Path:
    """A folder with a model in the Hub's layout, a config, a table and a file to predict."""
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    inside = (f"##{character}" for character in characters if character.isalnum())
    words = [*SPECIAL, *characters, *inside]
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=128,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "vocab.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "pretrain_mine.sh").write_text(f"""
source {repository}/configs/begin.sh
export BATCH=16 ROWS=8 RATE=1 DGXNNODES=1 DGXNGPU=2 MAX_SEQ_LENGTH=64 LR=1e-3 MAX_STEPS=20
source {repository}/configs/own_text.sh
export EVAL_ITER_SAMPLES=160 CHECKPOINT_EVERY_STEPS=2 LOG_EVERY_STEPS=10
source {repository}/configs/common.sh
""")
    (tmp_path / "table").mkdir()
    rows = [f"{'cat' if n % 2 else 'dog'} number {n},{n % 2}\n" for n in range(ROWS)]
    for name, some in (("train", rows[:64]), ("dev", rows[64:96])):
        (tmp_path / "table" / f"{name}.csv").write_text("text,label\n" + "".join(some))
    (tmp_path / "new.csv").write_text("text,label\n" + "".join(rows))
    return tmp_path


MADE = (
    *("data/packed_data/*", "data/eval/*", "data/phase1/*", "data/download/results4/*", "my-bert/*", "predicted.*"),
    *("results/tuned/model_0/predictions.tsv", "results/tuned/model_0/model.safetensors"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_ten_moments_all_results_equal_undisturbed_ones(folder, repository):
    whole, parts = folder / "whole", folder / "parts"
    go(whole, repository, [])
    go(parts, repository, MOMENTS)
    assert digests(parts, *MADE) == digests(whole, *MADE)
    assert len(digests(whole, *MADE)) > 10
    saved = Path("results", "pretrain_mine", "phase1", "checkpoints")
    assert same(newest(whole / saved), newest(parts / saved))
    losses = evaluations(whole)
    assert losses == evaluations(parts)
    assert sorted(losses) == [10, 20]
    assert losses[20] < losses[10]
    assert not [path for path in parts.rglob("*.partial") if path.is_file()]
