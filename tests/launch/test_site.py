"""env.sh: the paths that it derives from DATADIR follow a DATADIR that is exported after it."""

from __future__ import annotations

import pytest

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


def test_a_run_script_follows_it(checkout):
    done = checkout.run("./run_local.sh", after="export DATADIR=/later")
    assert done.returncode == 0, done.stderr
    weights = {rank["INIT_CHECKPOINT"] for rank in checkout.ranks()}
    assert weights == {"/later/phase1/model.ckpt-28252.pt"}
