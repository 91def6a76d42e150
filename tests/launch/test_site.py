"""Paths that env.sh and configs derive from DATADIR follow a DATADIR that is exported after them."""

from __future__ import annotations

import pytest

from input_preprocessing.dataset.steps import UNPACKED_FOLDER

from .captured import captured

SHOW = (
    "bash -c 'REPO_DIR=$PWD; source launch/run/variables.sh; exports::follow; "
    'echo "$DATADIR_PHASE2_PACKED $EVALDIR $CHECKPOINTDIR_PHASE1 $INIT_CHECKPOINT"\''
)


@pytest.mark.parametrize("before", ["", "/first"])
def test_paths_below_datadir_follow_a_datadir_exported_after_env_sh(checkout, before):
    exported = {"DATADIR": before} if before else {}
    done = checkout.run(SHOW, after="export DATADIR=/later", **exported)
    assert done.stdout.split() == [
        "/later/packed_data",
        "/later/eval",
        "/later/phase1",
        "/later/phase1/model.ckpt-28252.pt",
    ], done.stderr


def test_the_weights_follow_their_folder_and_a_path_of_ones_own_stays(checkout):
    own = "export EVALDIR=/mine/eval DATADIR=/later CHECKPOINTDIR_PHASE1=/weights"
    done = checkout.run(SHOW, after=own)
    assert done.stdout.split() == [
        "/later/packed_data",
        "/mine/eval",
        "/weights",
        "/weights/model.ckpt-28252.pt",
    ], done.stderr


def test_without_a_later_export_nothing_moves(checkout):
    done = checkout.run(SHOW, DATADIR="/first", EVALDIR="/second")
    assert done.stdout.split()[:2] == ["/first/packed_data", "/second"], done.stderr


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
    done = captured(
        ["bash", "-ec", f"{lines}\nexec {DATA}"], cwd=checkout.root, env=checkout.env
    )
    assert done.stdout.strip() == folder, done.stderr


def test_what_prepare_data_writes_in_phases_is_what_the_large_configs_read(repository):
    config = repository / "configs" / "large_model.sh"
    assert f"/128/hdf5/{UNPACKED_FOLDER}\n" in config.read_text()


def test_a_run_script_follows_it(checkout):
    checkout.run(after="export DATADIR=/later", status=0)
    weights = {rank["INIT_CHECKPOINT"] for rank in checkout.ranks()}
    assert weights == {"/later/phase1/model.ckpt-28252.pt"}
