"""Samsung's BERT on machines that ssh reaches: data in four bins of length, their settings and names,
a seed for each of NEXP runs.
"""

import json
from pathlib import Path

import pytest

from .conftest import STAGES, Shell, exported
from .foreign import instances, model_files, nvidia_checkpoint, tfrecord, variable_shard

BINS = {"128": (8, 128), "256": (129, 256), "384": (257, 384), "512": (385, 512)}
SETTINGS = "Samsung_Supercomputer21_DGXA100_128x8x16x1"
pytestmark = pytest.mark.journey  # root, for sshd


def few(**settings: str) -> str:
    """On 2 machines of 2 ranks instead of 128 of 8; the batch of a rank is theirs, 6:3:2:5."""
    made = exported(
        DGXNNODES="2", EXCHANGE_GROUP="2", MAX_STEPS="4", EVAL_ITER_START_SAMPLES="128",
        EVAL_ITER_SAMPLES="128", TARGET_MLM_ACCURACY="0.0001", LR="0.01", WARMUP_STEPS="1", START_WARMUP_STEP="0",
        LR_DECAY_STEPS="4", **settings,
    )  # fmt: skip
    return f"{made}; unset BATCHSIZE"


@pytest.fixture
def phase1(tmp_path: Path) -> Path:
    model_files(tmp_path / "phase1")
    nvidia_checkpoint(tmp_path / "phase1/model.ckpt-28252.pt")
    return tmp_path / "phase1"


def train(shell: Shell, bins: Path, evaluation: Path, phase1: Path) -> None:
    names = f"PYTHON={shell.env['PYTHON']} DGXSYSTEM={SETTINGS} INPUT_DIR={bins} EVAL_DIR={evaluation} NEXP=2"
    weights = f"{phase1}/model.ckpt-28252.pt"
    names += f" CHECKPOINTDIR_PHASE1={phase1} INIT_CHECKPOINT={weights}"
    done = shell.type(f"{few(SEED='1')}\n{names} ./run_multinode.sh")
    assert "all 2 trials reached the target" in done.stderr.splitlines()[-1]
    assert [shell.log(trial)["seed"] for trial in (0, 1)] == [1, 2]
    assert shell.log()["global_batch_size"] == 64
    used = json.loads((shell.results / "config.json").read_text())
    assert used["dist"]["world_size"] == 4
    assert used["data"]["bin_counts"] == "6:3:2:5"
    assert used["schedule"]["schedule"] == "samsung"


def test_their_hdf5_in_four_bins_trains(ssh_shell: Shell, phase1: Path) -> None:
    shell, data = ssh_shell, ssh_shell.folder / "data"
    for name, (_, longest) in BINS.items():
        (data / name).mkdir(parents=True)
        made = [one for one in instances(3000, 1, longest) if len(one.ids) >= BINS[name][0]]  # fmt: skip
        variable_shard(data / name / "part_00000_of_00001.hdf5", made[:80])
    (shell.folder / "eval").mkdir()
    variable_shard(shell.folder / "eval/part_eval_10k.hdf5", instances(20, 2))
    train(shell, data, shell.folder / "eval", phase1)


def test_tfrecords_are_imported_binned_and_trained_on(ssh_shell: Shell, phase1: Path) -> None:  # fmt: skip
    shell = ssh_shell
    for name in ("tfrecords", "eval"):
        (shell.folder / name).mkdir()
    for part in range(2):
        made = instances(600, part, longest=512)
        tfrecord(shell.folder / f"tfrecords/part-{part:05d}-of-00002", made)
    tfrecord(shell.folder / "eval_intermediate", instances(60, 7))
    shell.type(
        f"cd {shell.folder}\n"
        f"{STAGES} import_records --source tfrecords --target records --vocab-file phase1/vocab.txt\n"
        f"{STAGES} bins --source records --target bins --shards 2\n"
        f"{STAGES} evalset --source eval_intermediate --target eval/part_eval_10k.hdf5 --num-samples 20"
    )
    train(shell, shell.folder / "bins", shell.folder / "eval", phase1)
