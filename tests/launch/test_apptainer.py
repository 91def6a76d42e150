"""CONTAINER_RUNTIME=apptainer: the same run in an image file, without a daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPT = "./run_with_docker.sh"
STAND_IN = Path(__file__).resolve().parent / "fakes" / "container.py"


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.fixture
def apptainer(checkout):
    """The checkout, with an Apptainer that runs commands where they are, and an image file."""
    folder = checkout.root.parent
    program = folder / "bin" / "apptainer"
    program.write_text(
        f'#!/usr/bin/env bash\nexec "$REAL_PYTHON" -S "{STAND_IN}" apptainer "$@"\n'
    )
    program.chmod(0o755)
    (folder / "a checkout").rename(
        folder / "checkout"
    )  # a mounted path has neither space nor colon
    checkout.root = folder / "checkout"
    (folder / "bert.sif").touch()
    checkout.env |= {
        "CONTAINER_RUNTIME": "apptainer", "CONT": str(folder / "bert.sif"), "DATADIR": str(folder / "data"),
        "LOGDIR": str(folder / "results"),
    }  # fmt: skip
    (folder / "data" / "packed_data").mkdir(parents=True)
    return checkout


def test_trials_run_in_the_image_with_gpus_data_and_results(apptainer):
    done = apptainer.run(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert len(apptainer.ranks()) == 2
    calls = [json.loads(call) for call in apptainer.calls("apptainer")]
    assert calls[0]["command"] == ["true"], "tried before anything is written"
    calls = calls[1:]
    assert {call["image"] for call in calls} == {apptainer.env["CONT"]}
    trial = next(
        call["options"] for call in calls if "torchrun.py" in " ".join(call["command"])
    )
    folder = apptainer.root.parent
    assert (
        f"{folder / 'data/packed_data'}:{folder / 'data/packed_data'}:ro"
        in trial["--bind"]
    )
    assert f"{folder / 'results'}:{folder / 'results'}:rw" in trial["--bind"]
    assert {"--nv", "--no-home"} <= set(trial)
    assert trial["--env"] == ["PYTHONNOUSERSITE=1"]


def test_singularity_is_used_without_apptainer(apptainer):
    folder = apptainer.root.parent / "bin"
    (folder / "singularity").write_text(
        (folder / "apptainer").read_text().replace("apptainer ", "singularity ")
    )
    (folder / "singularity").chmod(0o755)
    (folder / "apptainer").unlink()
    done = apptainer.run(SCRIPT, after="export DEVICE=cpu")
    assert done.returncode == 0, done.stderr
    calls = [json.loads(call) for call in apptainer.calls("singularity")]
    assert len(calls) > 3
    assert not any("--nv" in call["options"] for call in calls)


def test_an_image_that_does_not_run_stops_before_anything_is_written(apptainer):
    (apptainer.root.parent / "bin" / "apptainer").write_text(
        "#!/bin/sh\necho 'FATAL: no squashfs' >&2\nexit 255\n"
    )
    done = apptainer.run(SCRIPT)
    assert done.returncode == 2
    assert last_line(done.stderr).endswith(
        "bert.sif: apptainer cannot run it on every node: FATAL: no squashfs"
    )
    assert not apptainer.logdir.exists()


@pytest.mark.parametrize(
    ("cont", "reason"),
    [
        ("missing.sif", "no such image: apptainer build"),
        ("bert.sqsh", "an enroot image; for Apptainer: apptainer build"),
    ],
)
def test_an_unusable_image_is_named_with_the_fix(apptainer, cont, reason):
    done = apptainer.run(SCRIPT, CONT=cont)
    assert done.returncode == 2
    assert f"CONT={cont}: {reason}" in last_line(done.stderr)
    assert not apptainer.logdir.exists()


@pytest.mark.slurm
def test_ranks_of_a_slurm_job_run_in_the_image(slurm):
    folder = slurm.checkout.root.parent
    program = folder / "bin" / "apptainer"
    program.write_text(
        f'#!/usr/bin/env bash\nexec "$REAL_PYTHON" -S "{STAND_IN}" apptainer "$@"\n'
    )
    program.chmod(0o755)
    (folder / "a checkout").rename(folder / "checkout")
    slurm.checkout.root = folder / "checkout"
    (folder / "bert.sif").touch()
    job = slurm.run(
        after="export DGXNNODES=2 CONTAINER_RUNTIME=apptainer NCCL_TEST=0",
        CONT=str(folder / "bert.sif"),
        LOGDIR=str(folder / "results"),
    )
    assert job.exit_code == 0, job.output
    assert sorted(rank["RANK"] for rank in slurm.checkout.ranks()) == [
        "0",
        "1",
        "2",
        "3",
    ]
    tried = [
        call
        for call in map(json.loads, slurm.checkout.calls("apptainer"))
        if call["command"] == ["true"]
    ]
    assert len(tried) == 2, "on both nodes"
