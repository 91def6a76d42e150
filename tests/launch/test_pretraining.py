"""run_pretraining.sh: phase 1, hand-over, phase 2; interrupted at any moment, the same command continues."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch

from bert.data.format import Metadata, write_records
from bert.data.synthetic import synthetic_records

CONFIG = "configs/pretrain_large_H100_1x8"
COMMAND = f"./run_pretraining.sh {CONFIG}"


def test_phase_2_follows_phase_1_from_its_checkpoints(checkout):
    finished = checkout.run(COMMAND, config=f"{CONFIG}.sh")
    assert finished.returncode == 0, finished.stderr
    folder = checkout.logdir / "pretrain_large_H100_1x8"
    first, second = [rank for rank in checkout.ranks() if rank["RANK"] == "0"]
    assert (first["PHASE"], second["PHASE"]) == ("1", "2")
    assert (first["MAX_SEQ_LENGTH"], second["MAX_SEQ_LENGTH"]) == ("128", "512")
    assert (first.get("INIT_CHECKPOINT") or "", first.get("INIT_OPTIMIZER")) == ("", None)
    assert (second["INIT_CHECKPOINT"], second["INIT_OPTIMIZER"]) == (str(folder / "phase1" / "checkpoints"), "1")
    for rank, phase in ((first, "phase1"), (second, "phase2")):
        assert (rank["CHECKPOINT_DIR"], rank["RESUME"]) == (str(folder / phase / "checkpoints"), "1")
    again = checkout.run(COMMAND, config=f"{CONFIG}.sh")
    assert again.returncode == 0, again.stderr
    assert len(checkout.ranks()) == 4, "both phases were complete: nothing trains again"


def test_a_phase_that_fails_ends_the_command_and_says_how_to_continue(checkout):
    finished = checkout.run(COMMAND, config=f"{CONFIG}.sh", TRIAL_0="crash")
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1] == "run: error: phase 1 is not complete: the same command continues it"
    assert {rank["PHASE"] for rank in checkout.ranks()} == {"1"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("./run_pretraining.sh", "usage: ./run_pretraining.sh configs/pretrain_NAME [--slurm]"),
        (f"{COMMAND} --fast", "usage: ./run_pretraining.sh configs/pretrain_NAME [--slurm]"),
        ("./run_pretraining.sh configs/none", "configs/none: no such config: ls configs/pretrain_*"),
    ],
)
def test_wrong_use_is_one_line(checkout, command, message):
    finished = checkout.run(command)
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[-1] == f"run: error: {message}"
    assert not checkout.logdir.exists() or not list(checkout.logdir.iterdir())


def test_slurm_gets_both_phases_as_a_chain(checkout):
    checkout.stand_in("sbatch", 'echo "chain $PHASE $INIT_OPTIMIZER $*" >>"$FAKE_CALLS"; echo "4${PHASE}"')
    finished = checkout.run(f"{COMMAND} --slurm", config=f"{CONFIG}.sh", INIT_OPTIMIZER="")
    assert finished.returncode == 0, finished.stderr
    first, second = checkout.calls("chain")
    assert first.split() == ["1", "--parsable", "-N", "1", "run.sub"]
    assert second.split() == ["2", "1", "--parsable", "-N", "1", "--dependency=afterok:41", "run.sub"]
    assert "phase 1 is job 41, phase 2 job 42 after it" in finished.stderr


def test_a_run_that_was_asked_to_stop_is_not_complete(checkout):
    finished = checkout.run(COMMAND, config=f"{CONFIG}.sh", TRIAL_0="stopped")
    assert finished.returncode == 1
    assert "trial 0: stopped at step 7 (STEPS_THIS_RUN)" in finished.stderr
    phase = checkout.logdir / "pretrain_large_H100_1x8" / "phase1"
    assert (phase / "failed_0.txt").is_file()
    assert not (phase / "result_0.txt").exists()


TINY = """#!/usr/bin/env bash
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=1 DGXNGPU=1 DEVICE=cpu SUBMISSION_DIVISION=open INIT_CHECKPOINT='' CHECK_COMPLIANCE=0 CLEAR_CACHES=0
export PACKED=1 PACKING_FACTOR=2 BATCHSIZE=3 MAX_SEQ_LENGTH=48 LR=0.02 LR_SCHEDULE=dle WARMUP_PROPORTION=0.2
export MAX_STEPS=$((40 * ${PHASE:-1})) CHECKPOINT_EVERY_STEPS=2 LOG_EVERY_STEPS=1 SEED=7 WALLTIME_RUNANDTIME=1
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
"""


@pytest.mark.slow
def test_interrupted_in_each_phase_it_ends_with_the_weights_of_an_undisturbed_run(repository, tmp_path):
    for name in ("packed", "phase1"):
        (tmp_path / name).mkdir()
    metadata = Metadata(max_seq_length=48, vocab_md5="0" * 32, random_seed=0, dupe_factor=1)
    write_records(tmp_path / "packed" / "part_00000_of_00001.hdf5", synthetic_records(60, 48, 211, True, 3), metadata)
    shape = '"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 40'
    (tmp_path / "phase1" / "bert_config.json").write_text(
        f'{{"vocab_size": 211, {shape}, "max_position_embeddings": 48}}'
    )
    root = tmp_path / "checkout"
    root.mkdir()
    for path in repository.iterdir():
        if path.name not in (".git", "configs"):
            (root / path.name).symlink_to(path)
    (root / "configs").mkdir()
    for path in (repository / "configs").iterdir():
        (root / "configs" / path.name).symlink_to(path)
    (root / "run_pretraining.sh").unlink()
    (root / "run_pretraining.sh").write_bytes((repository / "run_pretraining.sh").read_bytes())
    (root / "run_pretraining.sh").chmod(0o755)
    (root / "configs" / "pretrain_tiny.sh").write_text(TINY)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "DATADIR": str(tmp_path),
        "PYTHON": str(repository / ".venv" / "bin" / "python"), "DATADIR_PHASE2_PACKED": str(tmp_path / "packed"),
        "CHECKPOINTDIR_PHASE1": str(tmp_path / "phase1"), "LOGDIR": str(tmp_path / "results"),
    }  # fmt: skip

    def run(name, *stops):
        """Runs to the end; a file of each of ``stops`` ends an attempt before, as soon as it is there."""
        folder = tmp_path / "results" / name
        for pattern in [*stops, None]:
            process = subprocess.Popen(
                ["./run_pretraining.sh", "configs/pretrain_tiny"], cwd=root, env=environment | {"RUN_NAME": name},
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            if pattern:
                while process.poll() is None and not list(folder.glob(pattern)):
                    time.sleep(0.01)
                assert process.poll() is None, process.stderr.read()
                process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=300)[1]
            assert (process.returncode == 0) is (pattern is None), said
        (last,) = sorted((folder / "phase2" / "checkpoints").glob("step_*80.pt"))
        return torch.load(last, weights_only=True)["model"]

    whole = run("whole")
    parts = run("parts", "phase1/checkpoints/step_*06.pt", "phase2/checkpoints/*")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
