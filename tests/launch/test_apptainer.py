"""CONTAINER_RUNTIME=apptainer: the same run in an image file, without a daemon."""

import pytest

from . import platforms


@pytest.fixture
def apptainer(checkout):
    return platforms.apptainer(checkout)


def test_trials_run_in_the_image_with_gpus_data_and_results(apptainer):
    apptainer.run(status=0)
    assert len(apptainer.ranks()) == 2
    tried, *calls = apptainer.recorded("apptainer")
    assert tried["command"] == ["true"], "before anything is written"
    assert {call["image"] for call in calls} == {apptainer.env["CONT"]}
    words = ((" ".join(call["command"]), call["options"]) for call in calls)
    trial = next(options for command, options in words if "torchrun.py" in command)
    folder = apptainer.root.parent
    data, results = folder / "data/packed_data", folder / "results"
    assert {f"{data}:{data}:ro", f"{results}:{results}:rw"} <= set(trial["--bind"])
    assert {"--nv", "--no-home"} <= set(trial)
    assert trial["--env"] == ["PYTHONNOUSERSITE=1"]


def test_singularity_is_used_without_apptainer(apptainer):
    folder = apptainer.root.parent / "bin"
    program = (folder / "apptainer").rename(folder / "singularity")
    text = program.read_text().replace("apptainer ", "singularity ")
    program.write_text(text)
    apptainer.run(after="export DEVICE=cpu", status=0)
    calls = apptainer.recorded("singularity")
    assert len(calls) > 3
    assert not any("--nv" in call["options"] for call in calls)


def test_an_image_that_does_not_run_stops_before_anything_is_written(apptainer):
    fails = "#!/bin/sh\necho 'FATAL: no squashfs' >&2\nexit 255\n"
    (apptainer.root.parent / "bin" / "apptainer").write_text(fails)
    apptainer.refused("bert.sif: apptainer cannot run it on every node: FATAL: no squashfs")  # fmt: skip


@pytest.mark.slurm
@pytest.mark.parametrize("runtime", ["apptainer", "docker"])
def test_ranks_of_a_slurm_job_run_in_the_image(slurm, runtime):
    checkout = slurm.checkout
    checkout.with_containers(runtime)
    image = checkout.root.parent / "bert.sif"
    image.touch()
    after = f"export DGXNNODES=2 CONTAINER_RUNTIME={runtime} NCCL_TEST=0"
    name = str(image) if runtime == "apptainer" else "mlperf-bert"
    slurm.run(after=after, CONT=name, status=0)
    ranks = checkout.ranks()
    found = sorted((rank["RANK"], rank["WORLD_SIZE"]) for rank in ranks)
    assert found == [(rank, "4") for rank in "0123"]
    if runtime == "apptainer":
        calls = checkout.recorded(runtime)
        tried = [call for call in calls if call["command"] == ["true"]]
        assert len(tried) == 2, "on both nodes"
