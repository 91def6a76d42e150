"""A name that looks misspelt stops every launch script; your exports win over a config; configs
switch cleanly.
"""

from __future__ import annotations

import subprocess

import pytest

from .captured import captured

SCRIPTS = {
    "local": "./run_local.sh", "docker": "CONT=image ./run_with_docker.sh", "ssh": "HOSTS=node1 ./run_multinode.sh",
    "slurm": "SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 ./run.sub",
    "demo": "launch/tools/demo.sh",
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("BATCHSZIE", "BATCHSIZE"),
        ("LEARNING_RATE", "LR"),
        ("FUSE", "FUSED"),
        ("DGXNODES", "DGXNNODES"),
    ],
)
def test_a_misspelt_name_stops_every_script_before_it_starts_anything(
    checkout, script, name, meant
):
    done = checkout.run(f"env {SCRIPTS[script]}", **{name: "4"})
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"run: error: {name}: did you mean {meant}?" in done.stderr
    assert not checkout.ranks()
    assert not checkout.logdir.exists()


TAKING = ("local", "docker", "ssh", "slurm")


@pytest.mark.parametrize("script", TAKING)
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("MAX_LEN=64", "MAX_LEN: no such setting: did you mean MAX_SEQ_LENGTH?"),
        ("XYZZY=3", "XYZZY: no such setting: docs/variables.md has all"),
        ("lr=3", "lr=3: expected NAME=VALUE; did you mean LR=3?"),
        ("--fast", "--fast: expected NAME=VALUE"),
    ],
)
def test_what_follows_a_script_is_a_setting_that_somebody_reads(
    checkout, script, setting, told
):
    done = checkout.run(f"env {SCRIPTS[script]} SEED=3 {setting}")
    assert done.returncode == 2
    assert f"run: error: {told}" in done.stderr
    assert not checkout.logdir.exists()


@pytest.mark.parametrize("script", ["certify.sub", "certify.sh", "setup.sh venv"])
def test_a_script_without_settings_takes_none(checkout, repository, script):
    done = captured(
        [*f"{repository}/{script}".split(), "LR=3"], cwd=checkout.root, env=checkout.env
    )
    assert done.returncode == 2
    assert "LR=3: expected" in done.stderr.splitlines()[-1]


def test_a_setting_after_a_script_wins_over_the_config(checkout):
    done = checkout.run("./run_local.sh LR=0.5 NEXP=1", after="unset NEXP")
    assert done.returncode == 0, done.stderr
    assert {rank["LR"] for rank in checkout.ranks()} == {"0.5"}
    assert {rank["GIVEN_NAMES"].split()[0] for rank in checkout.ranks()} == {"LR"}


def test_a_node_without_a_python_leaves_the_names_to_the_trainers_check(checkout):
    for name in ("python", "python3"):
        checkout.stand_in(name, "exit 1")
    done = captured(
        ["bash", "-c", "REPO_DIR=$PWD; cd launch/run; source log.sh; source variables.sh; variables::check_names"],
        cwd=checkout.root, env=checkout.env | {"BATCHSZIE": "8"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def sourced(checkout, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return captured(
        ["bash", "-euc", script], cwd=checkout.root, env={"PATH": "/usr/bin:/bin"} | env, check=True,
    )  # fmt: skip


H100, DEMO, A100 = (
    f"source configs/config_{name}.sh;"
    for name in ("P8000H100_1x8x48x1_pack", "demo_1x2x16x1_pack", "DGXA100_1x8x56x1")
)


@pytest.mark.parametrize("order", [f"source env.sh; {H100}", f"{H100} source env.sh;"])
def test_your_exports_win_over_a_config_with_a_message(checkout, order):
    done = sourced(
        checkout, f"{order} echo $LR $BATCHSIZE $WALLTIME", LR="0.02", WALLTIME_RUNANDTIME="30",
    )  # fmt: skip
    assert done.stdout == "0.02 48 40\n"
    assert (
        "config: LR=0.02 is exported in this shell and overrides '0.00096' of config_P8000H"
        in done.stderr
    )
    assert "(unset LR to use that)" in done.stderr
    assert done.stderr.count("\n") == 2


def test_exports_after_a_config_survive_sourcing_another_one(checkout):
    done = sourced(
        checkout,
        f"{H100} export LR=0.02; {A100} echo $LR $BATCHSIZE; unset LR; {H100} echo $LR",
    )
    assert done.stdout == "0.02 56\n0.00096\n"


def test_one_config_after_another_leaves_nothing_of_the_first(checkout):
    """Also after one of the open division, which exports more names."""
    show = "export -p | grep -v '_EXPORTS=' | sort"
    alone = sourced(checkout, f"source env.sh; {H100} {show}")
    after = sourced(checkout, f"source env.sh; {DEMO} {A100} {H100} {show}")
    assert after.stdout == alone.stdout
    assert after.stderr == alone.stderr == ""


def test_your_exports_win_over_env_sh_and_an_edited_env_sh_over_its_previous_version(
    checkout,
):
    edit = (
        "sed -i s,/data/bert,/elsewhere, env.sh; source env.sh; echo $DATADIR $EVALDIR;"
    )
    assert (
        sourced(checkout, f"source env.sh; {edit}").stdout
        == "/elsewhere /elsewhere/eval\n"
    )
    done = sourced(checkout, "source env.sh; echo $DATADIR $EVALDIR", EVALDIR="/mine")
    assert done.stdout == "/elsewhere /mine\n"


def test_the_list_of_configs_has_a_row_of_each(checkout):
    table = sourced(checkout, "launch/tools/configs.sh").stdout.splitlines()
    assert table[0].split()[:3] == ["config", "nodes", "GPUs"]
    assert len(table) == 1 + len(list((checkout.root / "configs").glob("config_*.sh")))
    row = next(
        line.split() for line in table if line.startswith("DGXH100_4x8x48x1_pack")
    )
    assert row[1:] == [
        "4",
        "8",
        "48",
        "x",
        "1",
        "packed",
        "3072",
        "0.002711",
        "1040",
        "closed",
    ]
