"""A sweep is one run for each combination of settings, which names it."""

from __future__ import annotations

import pytest

CONFIG = "configs/config_P8000H100_1x8x48x1_pack.sh"


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def sweep(checkout, *arguments: str, **env: str):
    return checkout.run(
        f"launch/sweep.sh {' '.join(arguments)}", config="/dev/null", **env
    )


def test_each_combination_is_a_job_with_its_settings_and_name(checkout):
    checkout.stand_in(
        "sbatch",
        'echo "$RUN_NAME $DGXNNODES $GRADIENT_STEPS $LR $LOGDIR" >>"$FAKE_CALLS.jobs"; echo 17',
    )
    checkout.stand_in("date", "echo now")
    done = sweep(checkout, CONFIG, "DGXNNODES:GRADIENT_STEPS=1:4,2:2", "LR=0.001,0.002")
    assert done.returncode == 0, done.stderr
    folder = f"{checkout.logdir}/sweep_now"
    assert (checkout.root.parent / "calls.jobs").read_text().splitlines() == [
        f"P8000H100_1x8x48x1_pack_DGXNNODES-{nodes}_GRADIENT_STEPS-{steps}_LR-{lr} {nodes} {steps} {lr} {folder}"
        for nodes, steps in (("1", "4"), ("2", "2"))
        for lr in ("0.001", "0.002")
    ]
    calls = checkout.calls("sbatch")
    assert [call.split()[1] for call in calls] == ["'1'", "'1'", "'2'", "'2'"]  # -N
    assert done.stdout.count(": job 17") == 4


def test_without_settings_each_config_is_one_run(checkout):
    checkout.stand_in("sbatch", "echo 3")
    done = sweep(checkout, CONFIG, "configs/config_demo_1x2x16x1_pack.sh")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "P8000H100_1x8x48x1_pack: job 3",
        "demo_1x2x16x1_pack: job 3",
    ]


def test_local_runs_are_sequential_and_a_failure_is_not_hidden(checkout):
    done = sweep(checkout, "--local", CONFIG, "DGXNGPU=1,2", "SEED=7", TRIAL_0="crash")
    assert done.returncode == 1
    first, *others = [rank["WORLD_SIZE"] for rank in checkout.ranks()]
    assert (first, set(others)) == (
        "1",
        {"2"},
    )  # of two ranks one may be killed for the other's crash before it writes
    (folder,) = checkout.logdir.iterdir()
    assert last_line(done.stderr) == f"run: error: 2 of 2 runs failed: {folder}"
    runs = sorted(path.name for path in folder.iterdir())
    assert runs == [
        f"P8000H100_1x8x48x1_pack_DGXNGPU-{number}_SEED-7" for number in "12"
    ]
    done = sweep(checkout, "--local", CONFIG, "DGXNGPU=1", TRIAL_0="success")
    assert done.returncode == 0, done.stderr


def test_each_run_has_checkpoints_of_its_own(checkout, tmp_path):
    saved = tmp_path / "saved"
    axes = "LR=0.01,0.02"
    done = sweep(checkout, "--local", CONFIG, axes, CHECKPOINT_DIR=str(saved))
    assert done.returncode == 0, done.stderr
    assert {rank["LR"]: rank["CHECKPOINT_DIR"] for rank in checkout.ranks()} == {
        rate: f"{saved}/P8000H100_1x8x48x1_pack_LR-{rate}" for rate in ("0.01", "0.02")
    }


def test_a_dry_run_starts_nothing(checkout):
    done = sweep(checkout, "--dry-run", CONFIG, "NEXP=1,2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"P8000H100_1x8x48x1_pack_NEXP-{number}" for number in "12"
    ]
    assert not checkout.logdir.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "no config given"),
        (("configs/none.sh",), "configs/none.sh: no such config"),
        ((CONFIG, "LR="), "LR=: no value given"),
        ((CONFIG, "lr=1"), "lr=1: lr is not the name of a variable"),
        ((CONFIG, "LR:SEED=1"), "LR:SEED=1: '1': expected 2 value(s) joined by colons"),
        ((CONFIG, "'LR=$(id)'"), "LR=$(id): '$(id)': expected 1 value(s) joined by colons"),
        (("--fast", CONFIG), "--fast: no such config, or option"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(checkout, arguments, expected):
    checkout.stand_in("sbatch", "echo 1")
    done = sweep(checkout, *arguments)
    assert done.returncode != 0
    assert f"run: error: sweep: {expected}" in done.stderr
    assert not checkout.calls("sbatch")


def test_a_name_that_nobody_reads_is_refused(checkout):
    done = sweep(checkout, CONFIG, "LRR=1", "--dry-run")
    assert done.returncode != 0
    assert "run: error: LRR: no such setting: did you mean LR?" in done.stderr


def test_help_prints_the_usage(checkout):
    done = sweep(checkout, "--help")
    assert done.returncode == 0
    assert "launch/sweep.sh [--local] [--dry-run] CONFIG" in done.stdout
