"""A misspelt name stops every launch script; your exports win over a config; configs switch cleanly."""

import pytest

from .captured import Done, captured

SCRIPTS = {
    "local": "./run_local.sh", "docker": "CONT=image ./run_with_docker.sh", "ssh": "HOSTS=node1 ./run_multinode.sh",
    "slurm": "SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 ./run.sub",
}  # fmt: skip
NO_SETTING = "XYZZY: no such setting: docs/variables.md has all"
# All scripts ask one function: each of them one name, and one of them each.
WRONG = [(script, "BATCHSZIE=4", "", "BATCHSZIE: did you mean BATCHSIZE?") for script in SCRIPTS]  # fmt: skip
WRONG += [(script, "", "XYZZY=3", NO_SETTING) for script in ("docker", "ssh", "slurm")]
WRONG += [
    ("local", "LEARNING_RATE=4", "", "LEARNING_RATE: did you mean LR?"),
    ("local", "FUSE=4", "", "FUSE: did you mean FUSED?"),
    ("local", "DGXNODES=4", "", "DGXNODES: did you mean DGXNNODES?"),
    ("local", "", "XYZZY=3", NO_SETTING),
    ("local", "", "MAX_LEN=64", "MAX_LEN: no such setting: did you mean MAX_SEQ_LENGTH?"),
    ("local", "", "lr=3", "lr=3: expected NAME=VALUE; did you mean LR=3?"),
    ("local", "", "--fast", "--fast: expected NAME=VALUE"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "exported", "after", "said"), WRONG)
def test_a_wrong_name_stops_every_script(checkout, script, exported, after, said):
    """Before it starts anything: exported, or after the script, where settings follow."""
    own = f"SEED=3 {after}" if after else ""
    done = checkout.run(f"env {exported} {SCRIPTS[script]} {own}", status=2)
    assert f"run: error: {said}" in done.stderr
    assert not checkout.ranks()
    assert not checkout.logdir.exists()


@pytest.mark.parametrize("script", ["certify.sub", "certify.sh", "setup.sh venv"])
def test_a_script_without_settings_takes_none(checkout, repository, script):
    command = [*f"{repository}/{script}".split(), "LR=3"]
    done = captured(command, 2, cwd=checkout.root, env=checkout.env)
    assert "LR=3: expected" in done.last_line


def test_a_setting_after_a_script_wins_over_the_config(checkout):
    checkout.run("./run_local.sh LR=0.5 NEXP=1", after="unset NEXP", status=0)
    assert {rank["LR"] for rank in checkout.ranks()} == {"0.5"}
    assert {rank["GIVEN_NAMES"].split()[0] for rank in checkout.ranks()} == {"LR"}


def test_a_node_without_a_python_leaves_the_names_to_the_trainers_check(checkout):
    for name in ("python", "python3"):
        checkout.stand_in(name, "exit 1")
    line = "REPO_DIR=$PWD; cd launch/run; source log.sh; source variables.sh; variables::check_names"
    env = checkout.env | {"BATCHSZIE": "8"}
    done = captured(["bash", "-c", line], 0, cwd=checkout.root, env=env)
    assert done.stderr == ""


def sourced(checkout, script: str, **env: str) -> Done:
    environ = {"PATH": "/usr/bin:/bin"} | env
    return captured(["bash", "-euc", script], 0, cwd=checkout.root, env=environ)


H100, DEMO, A100 = (
    f"source configs/config_{name}.sh;"
    for name in ("P8000H100_1x8x48x1_pack", "demo_1x2x16x1_pack", "DGXA100_1x8x56x1")
)


@pytest.mark.parametrize("order", [f"source env.sh; {H100}", f"{H100} source env.sh;"])
def test_your_exports_win_over_a_config_with_a_message(checkout, order):
    own = {"LR": "0.02", "WALLTIME_RUNANDTIME": "30"}
    done = sourced(checkout, f"{order} echo $LR $BATCHSIZE $WALLTIME", **own)
    assert done.stdout == "0.02 48 40\n"
    overrides = "LR=0.02 is exported in this shell and overrides '0.00096'"
    assert f"config: {overrides} of config_P8000H" in done.stderr
    assert "(unset LR to use that)" in done.stderr
    assert done.stderr.count("\n") == 2


def test_exports_after_a_config_survive_sourcing_another_one(checkout):
    script = (
        f"{H100} export LR=0.02; {A100} echo $LR $BATCHSIZE; unset LR; {H100} echo $LR"
    )
    done = sourced(checkout, script)
    assert done.stdout == "0.02 56\n0.00096\n"


def test_one_config_after_another_leaves_nothing_of_the_first(checkout):
    """Also after one of the open division, which exports more names."""
    show = "export -p | grep -v '_EXPORTS=' | sort"
    alone = sourced(checkout, f"source env.sh; {H100} {show}")
    after = sourced(checkout, f"source env.sh; {DEMO} {A100} {H100} {show}")
    assert after.stdout == alone.stdout
    assert after.stderr == alone.stderr == ""


def test_your_exports_win_over_env_sh_and_an_edited_one_over_its_former(checkout):
    shown = "source env.sh; echo $DATADIR $EVALDIR"
    edit = f"source env.sh; sed -i s,/data/bert,/elsewhere, env.sh; {shown}"
    assert sourced(checkout, edit).stdout == "/elsewhere /elsewhere/eval\n"
    assert sourced(checkout, shown, EVALDIR="/mine").stdout == "/elsewhere /mine\n"


def test_the_list_of_configs_has_a_row_of_each(checkout):
    table = sourced(checkout, "launch/tools/configs.sh").stdout.splitlines()
    assert table[0].split()[:3] == ["config", "nodes", "GPUs"]
    assert len(table) == 1 + len(list((checkout.root / "configs").glob("config_*.sh")))
    (row,) = [line for line in table if line.startswith("DGXH100_4x8x48x1_pack")]
    expected = "4 8 48 x 1 packed 3072 0.002711 1040 closed"
    assert row.split()[1:] == expected.split()
