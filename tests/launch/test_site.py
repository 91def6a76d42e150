"""Paths that env.sh and configs derive from DATADIR follow a DATADIR that is exported after them."""

import pytest

from input_preprocessing.dataset.steps import UNPACKED_FOLDER

from .captured import captured

SHOW = (
    "bash -c 'REPO_DIR=$PWD; source launch/run/variables.sh; exports::follow; "
    'echo "$DATADIR_PHASE2_PACKED $EVALDIR $CHECKPOINTDIR_PHASE1 $INIT_CHECKPOINT"\''
)
WEIGHTS = "model.ckpt-28252.pt"
LATER = ["/later/packed_data", "/later/eval", "/later/phase1", f"/later/phase1/{WEIGHTS}"]  # fmt: skip
OWN = "EVALDIR=/mine/eval DATADIR=/later CHECKPOINTDIR_PHASE1=/weights"


@pytest.mark.parametrize(
    ("before", "after", "paths"),
    [
        ({}, "DATADIR=/later", LATER),
        ({"DATADIR": "/first"}, "DATADIR=/later", LATER),
        ({}, OWN, ["/later/packed_data", "/mine/eval", "/weights", f"/weights/{WEIGHTS}"]),
        # Without a later export nothing moves.
        ({"DATADIR": "/first", "EVALDIR": "/second"}, "X=", ["/first/packed_data", "/second"]),
    ],
)  # fmt: skip
def test_paths_follow_a_datadir_exported_after_env_sh(checkout, before, after, paths):
    done = checkout.run(SHOW, after=f"export {after}", **before)
    assert done.stdout.split()[: len(paths)] == paths, done.stderr


LARGE = "source configs/config_DGXH100_1x8x32x48_1.5b.sh;"
DATA = "bash -c 'REPO_DIR=$PWD; source launch/run/variables.sh; exports::follow; echo \"$DATADIR_PHASE2\"'"


@pytest.mark.parametrize(
    ("lines", "folder"),
    [
        (f"{LARGE} export DATADIR=/later", "/later/128/hdf5/training"),
        (f"export DATADIR=/first; {LARGE} export DATADIR=/later", "/later/128/hdf5/training"),
        (f"source ./env.sh; {LARGE} export DATADIR=/later", "/later/128/hdf5/training"),
        (f"{LARGE} source ./env.sh; export DATADIR=/later", "/later/128/hdf5/training"),
        (f"{LARGE} export DATADIR=/later DATADIR_PHASE2=/mine", "/mine"),
        (f"source ./env.sh; {LARGE}", "/data/bert/128/hdf5/training"),
    ],
)  # fmt: skip
def test_paths_of_a_config_follow_datadir_too(checkout, lines, folder):
    line = ["bash", "-ec", f"{lines}\nexec {DATA}"]
    done = captured(line, cwd=checkout.root, env=checkout.env)
    assert done.stdout.strip() == folder, done.stderr


def test_what_prepare_data_writes_in_phases_is_what_the_large_configs_read(repository):
    config = repository / "configs" / "large_model.sh"
    assert f"/128/hdf5/{UNPACKED_FOLDER}\n" in config.read_text()


def test_a_run_script_follows_it(checkout):
    checkout.run(after="export DATADIR=/later", status=0)
    assert {rank["INIT_CHECKPOINT"] for rank in checkout.ranks()} == {LATER[-1]}
