"""The list of variables matches what scripts and trainer read; docs/launch.md names only what exists."""

import re
from pathlib import Path

import pytest

from bert.core import variables
from bert.pretraining.config import PretrainingConfig
from common import env
from finetune.config import FinetuneConfig

from . import structure

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
def scripts():
    """Text by path."""
    root, kinds = Path(__file__).resolve().parents[1], ("run*.s*", "launch/**/*.sh", "configs/*.sh", "env.sh", "certify.s*")  # fmt: skip
    paths = [path for kind in kinds for path in root.glob(kind)]
    return {str(path.relative_to(root)): path.read_text() for path in paths}


@pytest.fixture(scope="module")
def programs(repository):
    """The launcher's Python."""
    return [path.read_text() for path in (repository / "launch").rglob("*.py")]


@pytest.fixture(scope="module")
def listed():
    return [entry for group in variables.groups().values() for entry in group]


@pytest.fixture(scope="module")
def table(listed):
    """Default by variable, for those that the list itself describes."""
    declared = variables.declared()
    own = [entry for entry in listed if declared.get(entry.name) != entry]
    return {entry.name: entry.default for entry in own}


def read_from_environment(scripts):
    """Variables that scripts read with a default or an error, with their defaults."""
    text = "\n".join(scripts.values())
    found = re.findall(r"\$\{([A-Z][A-Z0-9_]+):?[-+?=]([^{}$]*)", text)
    found += re.findall(r"variables::default ([A-Z][A-Z0-9_]+) ('[^']*'|\S+)", text)
    for settings in re.findall(r"variables::defaults ((?:.*\\\n)*.*)", text):
        found += re.findall(r"([A-Z][A-Z0-9_]+)=(\S+)", settings)
    defaults = {}
    for name, default in found:
        defaults.setdefault(name, set()).add(default.strip("'"))
    return defaults


def trainers(*kinds):
    """Names of the settings of these Configs."""
    return {one.name for kind in kinds for _, one, _ in env.variables(kind)}


def test_every_variable_of_the_launcher_is_listed_or_the_trainers(scripts, table):
    known = {*table, *trainers(PretrainingConfig, FinetuneConfig), *NOT_FOR_USERS}
    missing = set(read_from_environment(scripts)) - known
    assert not missing, f"launch/variables.txt says nothing of {sorted(missing)}"


def test_the_list_names_no_unread_variable(scripts, programs, table):
    text = "".join([*scripts.values(), *programs])
    assert [name for name in table if not re.search(rf"\b{name}\b", text)] == []


def test_the_defaults_of_the_list_are_those_of_the_scripts(scripts, table):
    found = read_from_environment(scripts)
    for name, default in table.items():
        if default not in ("unset", "required"):
            assert default in found[name], f"{name}: {default}, not {found[name]}"


def test_every_setting_of_the_trainer_is_listed_once(listed):
    names = [entry.name for entry in listed]
    assert len(names) == len(set(names))
    missing = trainers(PretrainingConfig) - set(names)
    assert not missing, f"add {missing} to launch/variables.txt, then: make variables"


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
    files = [str(path) for path in structure.tracked(repository)]
    named = set(re.findall(r"`([\w./]+\.(?:py|sh|sub|md|txt|json))`", text))
    assert len(named) > 40
    for name in named:
        assert any(file.endswith(f"/{name}") for file in files), name


def test_every_message_in_the_launch_page_is_a_scripts(repository, scripts, programs):
    text = (repository / "docs" / "launch.md").read_text()
    section = text.partition("## Messages")[2].partition("\n## ")[0]
    messages = re.findall(r"^\| `(.*?)` \|", section, re.M)
    roots = [repository / name for name in ("implementations/bert", "common")]
    ours = [path.read_text() for root in roots for path in root.rglob("*.py")]
    sources = "\n".join([*scripts.values(), *programs, *ours])
    assert len(messages) > 6
    # Numbers, names and values split a message into parts that the source contains.
    variable = r"\.\.\.|\d+(?:\.\d+)?|node\d|output_\S+|compliance_\S+|SIG\w+"
    for message in messages:
        parts = re.split(variable, message)
        assert all(part.strip() in sources for part in parts), message
