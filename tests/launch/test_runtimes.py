"""A container runtime is one file of launch/container/runtimes/: no other file names one."""

import re

import pytest

from .captured import captured

TOY = """
runtime_platforms=(local) runtime_default_on=()
container::check() { [[ $CONT == toy-* ]] || log::die "CONT=$CONT: expected toy-NAME"; }
container::create() { answers::run_on_all_nodes true || answers::die 'toy' "$answers_output"; }
container::arguments() { container=(env INSIDE="$CONT"); }
container::remove() { echo removed >>"$FAKE_CALLS"; }
"""


@pytest.fixture
def toy(checkout):
    """The scripts with a runtime that they do not know."""
    folder = checkout.without_spaces()
    (checkout.root / "launch" / "container" / "runtimes" / "toy.sh").write_text(TOY)
    checkout.script = "./run_with_docker.sh"
    checkout.env |= {"CONTAINER_RUNTIME": "toy", "CONT": "toy-bert"}
    # A real one has its own packages; PYTHONPATH does not go along.
    python = folder / "bin" / "python"
    packages = f'export PYTHONPATH="{checkout.root}/implementations:{checkout.root}"'
    python.write_text(python.read_text().replace("set -uo pipefail", packages))
    return checkout


def test_a_runtime_of_one_file_runs_the_ranks_and_is_removed_at_the_end(toy):
    toy.run(status=0)
    assert {rank["INSIDE"] for rank in toy.ranks()} == {"toy-bert"}
    assert toy.calls("removed")


def test_its_own_check_is_respected(toy):
    toy.refused("CONT=bert: expected toy-NAME", CONT="bert")


def test_the_platforms_that_it_names_are_respected(toy):
    reason = "CONTAINER_RUNTIME=toy is for Local: use docker"
    toy.refused(reason, "./run_multinode.sh", HOSTS="a")


@pytest.mark.parametrize("name", ["pyxis", "apptainer", "docker"])
def test_a_runtime_is_read_before_an_attempt_has_a_name(checkout, name):
    file = checkout.root / "launch" / "container" / "runtimes" / f"{name}.sh"
    script = 'PLATFORM=slurm REPO_DIR=$1; source "$2"; echo ${runtime_platforms[*]}'
    line = ["bash", "-euc", script, "-", str(checkout.root), str(file)]
    done = captured(line, 0, env=checkout.env)
    assert done.stderr == ""
    assert "slurm" in done.stdout


def test_no_other_file_of_the_launcher_names_a_runtime(repository):
    folder = repository / "launch" / "container" / "runtimes"
    names = "|".join([*(path.stem for path in folder.glob("*.sh")), "enroot"])
    for path in [*(repository / "launch").rglob("*.sh"), repository / "run.sub"]:
        if path.parent == folder:
            continue
        for line in path.read_text().splitlines():
            code = line.partition("# ")[0]
            assert not re.search(rf"\b({names})\b", code), f"{path}: {line}"
