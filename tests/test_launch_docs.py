"""The list of variables matches what scripts and trainer read; docs/launch.md names only what
exists.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bert.core import variables
from bert.pretraining.config import PretrainingConfig
from common import env
from finetune.config import FinetuneConfig

# Set by Slurm, by ssh or by the launcher itself; or paths of system files that tests replace.
OWN = """
BASH_VERSION LAUNCH_PRINT PLATFORM SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_CONTAINER
SLURM_EXPORT_ENV SLURM_HET_SIZE SLURM_JOB SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_PROCID
SLURM_RESTART_COUNT SLURM_SUBMIT_DIR SLURM_GPUS SLURM_GPUS_ON_NODE SLURM_JOB_GPUS SLURMD_NODENAME
PROC_STATUS PROC_SYS SYSFS TOPOLOGY_GPUS ATTEMPT ATTEMPT_NAME ATTEMPT_STATUS CERTIFY_LINE
CONTAINER_NAME CONTINUED_BY STAGED SLURM_NTASKS SLURM_STEP_NUM_TASKS CONFIG_EXPORTS SITE_EXPORTS
"""
COMPILERS = "TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR CUDA_CACHE_PATH NUMBA_CACHE_DIR"
# Of CUDA, gloo, NCCL, Python and Slurm, by their own documentation.
DOCUMENTED = "CUDA_DEVICE_ORDER GLOO_SOCKET_IFNAME NCCL_IB_HCA PYTHONPATH SBATCH_PARTITION SBATCH_TIMELIMIT"
NOT_FOR_USERS = {*OWN.split(), *COMPILERS.split(), *DOCUMENTED.split()}


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    root = Path(__file__).resolve().parents[1]
    paths = [
        *root.glob("run*.s*"),
        *(root / "launch").rglob("*.sh"),
        *(root / "configs").glob("*.sh"),
        root / "env.sh",
        *root.glob("certify.s*"),
    ]
    return {str(path.relative_to(root)): path.read_text() for path in paths}


@pytest.fixture(scope="module")
def table() -> dict[str, str]:
    """Default by variable, for those that the list itself describes."""
    declared = variables.declared()
    entries = [entry for group in variables.groups().values() for entry in group]
    return {
        entry.name: entry.default
        for entry in entries
        if declared.get(entry.name) != entry
    }


def read_from_environment(scripts: dict[str, str]) -> dict[str, set[str]]:
    """Variables that scripts read with a default or an error, with their defaults."""
    found: dict[str, set[str]] = {}
    for text in scripts.values():
        for name, default in re.findall(
            r"\$\{([A-Z][A-Z0-9_]+):?[-+?=]([^{}$]*)", text
        ):
            found.setdefault(name, set()).add(default)
        for name, default in re.findall(
            r"variables::default ([A-Z][A-Z0-9_]+) ('[^']*'|\S+)", text
        ):
            found.setdefault(name, set()).add(default.strip("'"))
        for settings in re.findall(r"variables::defaults ((?:.*\\\n)*.*)", text):
            for name, default in re.findall(r"([A-Z][A-Z0-9_]+)=(\S+)", settings):
                found.setdefault(name, set()).add(default)
    return found


def test_every_variable_of_the_launcher_is_listed_or_the_trainers(scripts, table):
    trainer = {
        variable.name
        for kind in (PretrainingConfig, FinetuneConfig)
        for _, variable, _ in env.variables(kind)
    }
    missing = set(read_from_environment(scripts)) - set(table) - trainer - NOT_FOR_USERS
    assert not missing, f"launch/variables.txt says nothing of {sorted(missing)}"


def test_the_list_names_no_unread_variable(scripts, table):
    launch = Path(__file__).resolve().parents[1] / "launch"
    programs = [path.read_text() for path in launch.rglob("*.py")]
    text = "".join([*scripts.values(), *programs])
    unread = {name for name in table if not re.search(rf"\b{name}\b", text)}
    assert not unread


def test_the_defaults_of_the_list_are_those_of_the_scripts(scripts, table):
    found = read_from_environment(scripts)
    for name, default in table.items():
        if default not in ("unset", "required"):
            assert default in found[name], (
                f"{name}: the list says {default}, the scripts {found[name]}"
            )


def test_every_setting_of_the_trainer_is_listed_once():
    listed = [
        entry.name for entries in variables.groups().values() for entry in entries
    ]
    assert len(listed) == len(set(listed))
    missing = {
        variable.name for _, variable, _ in env.variables(PretrainingConfig)
    } - set(listed)
    assert not missing, (
        f"add {sorted(missing)} to a group of launch/variables.txt, then run: make variables"
    )


def test_the_page_of_variables_is_up_to_date(repository):
    page = (repository / "docs" / "variables.md").read_text(encoding="utf-8")
    assert page == variables.markdown() + "\n", "run: make variables"


def test_every_script_and_config_in_the_launch_page_exists(repository):
    text = (repository / "docs" / "launch.md").read_text()
    for name in set(re.findall(r"\b[\w/]+\.sh\b|run\.sub", text)) - {"prepare_data.sh"}:
        assert (repository / name).is_file(), name
    for part in re.findall(r"DGXSYSTEM=(\w+)", text):
        assert (repository / "configs" / f"config_{part}.sh").is_file(), part


def test_every_file_in_contributing_exists(repository):
    text = re.sub(r"[<*]\S*", "", (repository / "CONTRIBUTING.md").read_text())
    files = [
        f"/{path.relative_to(repository)}"
        for path in repository.rglob("*.*")
        if ".venv" not in path.parts
    ]
    named = set(re.findall(r"`([\w./]+\.(?:py|sh|sub|md|txt|json))`", text))
    assert len(named) > 40
    assert [
        name
        for name in sorted(named)
        if not any(file.endswith(f"/{name}") for file in files)
    ] == []


def test_every_message_in_the_launch_page_is_printed_by_a_script(repository, scripts):
    text = (repository / "docs" / "launch.md").read_text()
    messages = re.findall(
        r"^\| `(.*?)` \|", text.partition("## Messages")[2].partition("\n## ")[0], re.M
    )
    programs = [path.read_text() for path in (repository / "launch").rglob("*.py")]
    sources = "\n".join([*scripts.values(), *programs])
    sources += "".join(
        (repository / f"implementations/bert/{name}.py").read_text()
        for name in (
            "pretraining/run",
            "pretraining/closed_division",
            "core/dist",
            "../../common/files",
        )
    )
    assert len(messages) > 6
    for message in messages:
        # Variable parts (numbers, names, values) split the message into parts that the source
        # contains.
        parts = re.split(
            r"\.\.\.|\d+(?:\.\d+)?|node\d|output_\S+|compliance_\S+|SIG\w+", message
        )
        assert all(part.strip() in sources for part in parts), message
