"""The doctor passes a healthy site, and names each problem with the command to fix it."""

import os
import re
import shutil
from typing import Any

import pytest

from .captured import Done, captured

# Tools that the scripts call besides the stand-ins.
TOOLS = (
    "awk basename bash cat cut date dirname env getent grep head id mktemp paste realpath rm rmdir sed seq "
    "sort stat tail timeout tr uname wc"
)
SINFO = """case "$*" in
  *--version*) echo "slurm 23.11.4" ;;
  *) [[ ! ${DOWN:-} ]] || { echo "slurm_load_partitions: Unable to contact slurm controller" >&2; exit 1; }
     echo "batch|${STATE:-up}|${NODES:-4}|${GRES:-gpu:h100:8(S:0-1)}|${PARTITIONS:-batch*}" ;;
esac"""
SMI = """case "$*" in
  *query-gpu*) [[ ! ${NO_DRIVER:-} ]] || { echo "NVIDIA-SMI has failed because it couldn't communicate"; exit 9; }
    for ((i = 0; i < ${GPUS:-8}; i++)); do
      echo "${MODEL:-NVIDIA H100}, 81559, 550.54.15"
    done ;;
  *) echo "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |" ;;
esac"""
CHECKED = """import os, sys
if os.environ.get("UNFIT"):
    print("bert: error: INIT_CHECKPOINT=/d/w.pt: not a checkpoint", file=sys.stderr)
    sys.exit(2)
print("global batch  768 sequences = 48 rows x 1 accumulated x 8 ranks x 2")
print("weights       /d/w.pt")
"""


@pytest.fixture
def site(checkout):
    """A compute node of a healthy cluster, with only stand-ins and plain tools on PATH."""
    bin_folder = checkout.root.parent / "bin"
    for tool in TOOLS.split():
        path = shutil.which(tool)
        if path and not (bin_folder / tool).exists():
            (bin_folder / tool).symlink_to(path)
    folder = checkout.without_spaces()
    for name, script in {
        "sinfo": SINFO, "nvidia-smi": SMI, "sbatch": "", "sudo": "[[ ! ${NO_SUDO:-} ]]",
        "scontrol": "echo NodeName=$3",
    }.items():  # fmt: skip
        checkout.stand_in(name, script)
    checkout.size = "DGXNGPU=8"
    for name in ("packed_data", "eval", "phase1", "proc/vm", "sys/class"):
        (folder / "data" / name).mkdir(parents=True)
        (folder / "data" / name / "file").touch()
    (folder / "bert.sqsh").write_text("hsqs and more")
    (checkout.root / "implementations" / "bert" / "__main__.py").write_text(CHECKED)
    (checkout.root / "h5py").mkdir()
    (checkout.root / "torch" / "__init__.py").write_text("__version__ = '2.7'\n")
    checkout.env |= {
        "PATH": str(bin_folder), "DATADIR": str(folder / "data"),
        "CONT": str(folder / "bert.sqsh"), "SLURM_PROCID": "0", "SYSFS": str(folder / "data" / "sys"),
        "PROC_SYS": str(folder / "data" / "proc"),
    }  # fmt: skip
    return checkout


def doctor(site, *groups: str, **how: Any) -> Done:
    return site.run(f"./launch/doctor.sh {' '.join(groups)}", **how)


def rows(text: str) -> dict[str, tuple[str, str, str]]:
    """Result, finding and fix of each check."""
    found: dict[str, tuple[str, str, str]] = {}
    for line in text.splitlines():
        if row := re.match(r" (pass|warn|fail|skip)  (.{21}) (.*)", line):
            name = row[2].strip()
            found[name] = (row[1], row[3], "")
        elif cure := re.match(r" {29}-> (.*)", line):
            found[name] = (*found[name][:2], cure[1])
    return found


def test_a_healthy_site_passes(site):
    """What is no failure is none: a machine that cannot drop caches is warned."""
    done = doctor(site, NO_SUDO="1", status=0)
    found = rows(done.stdout)
    assert not done.stderr
    bad = {name for name, row in found.items() if row[0] not in ("pass", "skip")}
    assert bad == {"drop caches"}
    assert found["drop caches"][0] == "warn"
    assert "visudo" in " ".join(found["drop caches"])
    names = "variables,slurm,partition,drop caches,GPUs,driver,weights,run"
    assert set(found) >= set(names.split(","))
    assert found["driver"][1] == "550.54.15"
    assert done.stdout.endswith(" 0 failed, 1 warnings\n")


def test_a_misspelt_name_is_a_row_of_the_whole_table(site):
    found = rows(doctor(site, BATCHSZIE="3", status=1).stdout)
    assert found["variables"][0] == "fail"
    assert "BATCHSZIE: did you mean BATCHSIZE?" in found["variables"][1]
    assert {"slurm", "GPUs", "run"} <= set(found)


@pytest.mark.parametrize(
    ("groups", "broken", "check", "finding", "cure"),
    [
        ("slurm", {"DOWN": "1"}, "slurm", "Unable to contact slurm controller", "systemctl status slurmctld munge"),
        ("slurm", {"PARTITIONS": "batch"}, "partition", "'': no such", "export SBATCH_PARTITION=batch"),
        ("slurm", {"SBATCH_PARTITION": "gpu"}, "partition", "'gpu': no such", "export SBATCH_PARTITION=batch"),
        ("slurm", {"STATE": "down"}, "partition", "batch is down", "scontrol update PartitionName=batch State=UP"),
        ("slurm", {"NODES": "0"}, "partition", "batch has 0 nodes", ""),
        ("gpu", {"GPUS": "7"}, "GPUs", "7 x NVIDIA H100, 81559 MB and the config wants DGXNGPU=8", "smaller config"),
        ("gpu", {"NO_DRIVER": "1"}, "GPUs", "couldn't communicate", "driver"),
        ("machine", {"CLEAR_CACHES": "require", "NO_SUDO": "1"}, "drop caches", "does not start", "visudo"),
        ("data", {"EVALDIR": "/no/eval", "CONT": ""}, "EVALDIR", "/no/eval: no such folder", "prepare_data.sh"),
        ("data", {"UNFIT": "1", "CONT": ""}, "checkpoint, run", "INIT_CHECKPOINT=/d/w.pt: not a checkpoint", "--check"),
        ("data", {"PYTHON": "/no/python", "CONT": ""}, "checkpoint, run", "/no/python has no torch", "make setup"),
    ],
)  # fmt: skip
def test_a_problem_is_named_with_its_cure(site, groups, broken, check, finding, cure):
    done = doctor(site, groups, status=1, **broken)
    assert not done.stderr
    result, found, fix = rows(done.stdout)[check]
    assert result == "fail", done.stdout
    assert finding in found
    assert cure in fix


def test_a_machine_without_the_launchers_python_is_told(site):
    (site.root.parent / "bin" / "python3").unlink()
    done = doctor(site, PYTHON="/no/python", status=2)
    finding = "has no python3 of 3.6 or newer, with which the launcher decides"
    assert finding in done.stderr


def test_several_nodes_prefix_their_lines_with_their_names(site):
    several = {"SLURM_STEP_NUM_TASKS": "2", "SLURMD_NODENAME": "dgx7"}
    lines = doctor(site, "slurm", **several).stdout.splitlines()
    assert all(line.startswith("dgx7: ") for line in lines)


@pytest.mark.parametrize(("status", "result"), [(0, "pass"), (1, "fail")])
def test_the_whole_data_set_is_verified_on_request(site, status, result):
    script = site.root / "verify_dataset.sh"
    script.write_text(f'#!/usr/bin/env bash\necho "verdict on $1"\nexit {status}\n')
    script.chmod(0o755)
    done = doctor(site, "verify", status=status)
    said = f"verdict on {site.env['DATADIR']}"
    assert rows(done.stdout)["data verified"][:2] == (result, said)


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
def test_a_login_node_is_not_blamed_for_having_no_gpu(site):
    (site.root.parent / "bin" / "nvidia-smi").unlink()
    done = doctor(site, "gpu", SLURM_PROCID="", status=0)
    cure = "srun --exclusive launch/doctor.sh machine gpu data"
    assert rows(done.stdout)["GPUs"] == ("skip", "this node submits jobs", cure)


def test_without_a_config_only_what_needs_one_is_skipped(site):
    command, how = ["./launch/doctor.sh", "slurm", "data"], {"cwd": site.root}
    found = rows(captured(command, 0, env=site.env, **how).stdout)
    result, _, cure = found["checkpoint, run"]
    assert result == "skip"
    assert "config" in cure
    assert "EVALDIR" not in found, "env.sh was sourced"


def test_an_unknown_group_is_wrong_usage(site):
    done = doctor(site, "disk", status=2)
    expected = "disk: expected one of slurm machine gpu data verify"
    assert done.stderr == f"run: error: {expected}\n"


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("setting", "result", "finding"),
    [
        ("", "pass", "2 nodes of gpu:h100:8"),
        ("export DGXNNODES=3", "fail", "has 2 nodes and the config wants DGXNNODES=3"),
        ("export SBATCH_PARTITION=none", "fail", "'none': no such partition"),
    ],
)
def test_a_real_slurm_is_checked_as_run_sub_uses_it(slurm, setting, result, finding):
    slurm.checkout.size = "DGXNGPU=8"
    status = int(result == "fail")
    found = rows(doctor(slurm.checkout, "slurm", after=setting, status=status).stdout)
    assert found["slurm"][0] == "pass"
    assert found["partition"][0] == result
    assert finding in found["partition"][1]


@pytest.mark.slurm
def test_the_nodes_of_a_real_slurm_are_checked_by_a_step(slurm):
    command = "srun --nodes=2 --ntasks-per-node=1 ./launch/doctor.sh machine gpu"
    given = {"after": "export DEVICE=cpu", "PYTHON": "python", "LOGDIR": str(slurm.folder)}  # fmt: skip
    said = slurm.checkout.run(command, **given).stdout
    for node in ("dgx1", "dgx2"):
        assert said.count(f"{node}: pass  drop caches ") == 1, said
        assert said.count(f"{node}: skip  GPUs                  DEVICE=cpu") == 1
