"""The doctor passes a healthy site, and names each problem with the command to fix it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

# Tools that the scripts call besides the stand-ins.
TOOLS = (
    "awk basename bash cat cut date dirname env find getent grep head id mktemp paste realpath rm rmdir sed seq "
    "sort stat tail timeout tr uname wc"
)
SINFO = """case "$*" in
  *--version*) echo "slurm 23.11.4" ;;
  *--format=%n*) echo dgx1 ;;
  *--format=%P*) echo "${PARTITIONS:-batch*}" ;;
  *) [[ ! ${DOWN:-} ]] || { echo "slurm_load_partitions: Unable to contact slurm controller" >&2; exit 1; }
     echo "batch|${STATE:-up}|${NODES:-4}|${GRES:-gpu:h100:8(S:0-1)}" ;;
esac"""
SRUN = """case "$*" in
  --help) printf '%s\\n' ${PYXIS---container-image --container-name --container-mounts --no-container-mount-home \
--container-remap-root --container-writable}
    [[ ! ${DLOPEN:-} ]] || echo "srun: error: spank: Dlopen of plugin file failed: $DLOPEN: cannot open it" >&2 ;;
  *--container-image*) printf '%s\\n' "${CONTAINER-answer dgx1}"; exit "${CONTAINER_STATUS:-0}" ;;
esac"""
SMI = """case "$*" in
  *query-gpu*) [[ ! ${NO_DRIVER:-} ]] || { echo "NVIDIA-SMI has failed because it couldn't communicate"; exit 9; }
    for ((i = 0; i < ${GPUS:-8}; i++)); do
      echo "${MODEL:-NVIDIA H100}, 81559, 550.54.15, ${PERSISTENCE:-Enabled}"
    done ;;
  *) echo "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |" ;;
esac"""
CORRUPT = "slurmstepd: error: pyxis:     FATAL ERROR: File system corruption detected"
NO_START = "srun: error: task 0 launch failed: Plugin initialization failed"
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
    (checkout.root.parent / "a checkout").rename(checkout.root.parent / "checkout")
    checkout.root = checkout.root.parent / "checkout"
    for name, script in {
        "sinfo": SINFO,
        "srun": SRUN,
        "nvidia-smi": SMI,
        "sbatch": "",
        "sudo": "[[ ! ${NO_SUDO:-} ]]",
        "scontrol": "echo NodeName=$3 ${SPEC:-}",
        "df": "printf 'Avail\\n%sG\\n' \"${FREE-900}\"",
    }.items():
        checkout.stand_in(name, script)
    folder = checkout.root.parent
    for name in (
        "packed_data",
        "eval",
        "phase1",
        "sys/devices/system/node/node0",
        "sys/devices/system/cpu",
        "proc/user",
    ):
        (folder / "data" / name).mkdir(parents=True)
        (folder / "data" / name / "file").touch()
    (folder / "data" / "prepared-packed.json").touch()
    (folder / "data" / "sys/devices/system/cpu/online").write_text("0-63\n")
    (folder / "data" / "status").write_text("Cpus_allowed_list:\t0-27,32-59\n")
    (folder / "bert.sqsh").write_text("hsqs and more")
    (checkout.root / "implementations" / "bert" / "__main__.py").write_text(CHECKED)
    (checkout.root / "h5py").mkdir()
    (checkout.root / "torch" / "__init__.py").write_text("__version__ = '2.7'\n")
    checkout.env |= {
        "PATH": str(bin_folder),
        "DATADIR": str(folder / "data"),
        "LOGDIR": str(folder / "results"),
        "CONT": str(folder / "bert.sqsh"),
        "SLURM_PROCID": "0",
        "SYSFS": str(folder / "data" / "sys"),
        "PROC_SYS": str(folder / "data" / "proc"),
        "PROC_STATUS": str(folder / "data" / "status"),
    }
    return checkout


def doctor(
    site, *groups: str, after: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    after = f"export DGXNGPU=8; {after}"
    return site.run(f"./launch/doctor.sh {' '.join(groups)}", after=after, **env)


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
    done = doctor(site)
    found = rows(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    assert {
        name: row[0] for name, row in found.items() if row[0] not in ("pass", "skip")
    } == {}
    assert set(found) >= {
        *(
            "slurm",
            "partition",
            "gres",
            "pyxis",
        ),
        *("CPUs", "memlock", "drop caches", "LOGDIR", "GPUs", "driver"),
        *("DATADIR_PHASE2_PACKED", "EVALDIR", "CHECKPOINTDIR_PHASE1", "data manifest"),
    }
    assert found["gres"][1] == "8 x gpu a node"
    assert found["CPUs"][1] == "56 of 64 CPUs on 1 NUMA nodes, 8 reserved"
    assert found["driver"][1] == "550.54.15, CUDA 12.4"
    assert done.stdout.endswith(" 0 failed, 0 warnings\n")


def test_a_misspelt_name_is_a_row_of_the_whole_table(site):
    done = doctor(site, BATCHSZIE="3")
    found = rows(done.stdout)
    assert (done.returncode, found["variables"][0]) == (1, "fail")
    assert "BATCHSZIE: did you mean BATCHSIZE?" in found["variables"][1]
    assert {"slurm", "GPUs", "EVALDIR"} <= set(found)


@pytest.mark.parametrize(
    ("broken", "check", "finding", "cure"),
    [
        (
            {"DOWN": "1"},
            "slurm",
            "Unable to contact slurm controller",
            "systemctl status slurmctld munge",
        ),
        (
            {"PARTITIONS": "batch"},
            "partition",
            "no default partition",
            "export SBATCH_PARTITION=batch",
        ),
        (
            {"SBATCH_PARTITION": "gpu"},
            "partition",
            "gpu: no such partition",
            "export SBATCH_PARTITION=batch",
        ),
        (
            {"STATE": "down"},
            "partition",
            "batch is down",
            "scontrol update PartitionName=batch State=UP",
        ),
        ({"NODES": "0"}, "partition", "batch has 0 nodes", "smaller config"),
        (
            {"GRES": "gpu:h100:4(S:0,1),nic:2"},
            "gres",
            "a node has 4 x gpu and the config wants DGXNGPU=8",
            "fewer GPUs",
        ),
        ({"GPU_GRES": "gpu:a100"}, "gres", "the nodes have no gpu:a100", "GPU_GRES"),
        (
            {"PYXIS": ""},
            "pyxis",
            "no option --container-image",
            "CONTAINER_RUNTIME=apptainer",
        ),
        (
            {"PYXIS": "", "DLOPEN": "/opt/pyxis.so"},
            "pyxis",
            "Dlopen of plugin file failed: /opt/pyxis.so",
            "plugstack.conf",
        ),
        (
            {"PYXIS": "--container-image --container-name"},
            "pyxis",
            "srun lacks --container-mounts",
            "install pyxis",
        ),
    ],
)
def test_slurm_problems_are_named_with_the_fix(site, broken, check, finding, cure):
    assert_fails(doctor(site, "slurm", **broken), check, finding, cure)


@pytest.mark.parametrize(
    ("broken", "check", "finding", "cure"),
    [
        (
            {"CONT": "missing.sqsh"},
            "pyxis",
            "missing.sqsh: no such image: enroot import",
            "",
        ),
        (
            {"CONTAINER": CORRUPT},
            "pyxis",
            "bert.sqsh does not run on a node of the partition: FATAL ERROR: File sys",
            "enroot list",
        ),
        (
            {"CONTAINER": NO_START},
            "pyxis",
            "task 0 launch failed: Plugin initialization failed",
            "kernel.unprivileged_userns_clone (1)",
        ),
    ],
)
def test_container_problems_are_named_with_the_fix(site, broken, check, finding, cure):
    assert_fails(doctor(site, "container", **broken), check, finding, cure)


def test_a_check_that_could_not_run_does_not_pass(site):
    busy = {
        "CONTAINER": "srun: error: Unable to allocate resources: Requested nodes are busy",
        "CONTAINER_STATUS": "1",
    }
    result, finding, _ = rows(doctor(site, "container", **busy).stdout)["pyxis"]
    assert (result, finding[:47]) == (
        "skip",
        "not tried: no node was free within a minute (Un",
    )


def test_nodes_without_gres_for_gpus_pass_as_run_sub_runs_there(site):
    assert rows(doctor(site, "slurm", GRES="(null)").stdout)["gres"][0] == "pass"


def test_several_nodes_prefix_their_lines_with_their_names(site):
    lines = doctor(
        site, "slurm", SLURM_STEP_NUM_TASKS="2", SLURMD_NODENAME="dgx7"
    ).stdout.splitlines()
    assert all(line.startswith("dgx7: ") for line in lines)


@pytest.mark.parametrize(
    ("broken", "check", "finding", "cure"),
    [
        (
            {"GPUS": "7"},
            "GPUs",
            "7 x NVIDIA H100 and the config wants DGXNGPU=8",
            "smaller config",
        ),
        ({"NO_DRIVER": "1"}, "GPUs", "couldn't communicate", "driver"),
        ({"FREE": "0"}, "LOGDIR", "0 GB free", ""),
        ({"PYTHON": "/no/python"}, "Python", "/no/python", "make setup"),
        (
            {"CLEAR_CACHES": "require", "NO_SUDO": "1"},
            "drop caches",
            "a closed run on GPUs does not start",
            "visudo",
        ),
        (
            {"EVALDIR": "/no/eval"},
            "EVALDIR",
            "/no/eval: no such folder",
            "prepare_data.sh",
        ),
        (
            {"UNFIT": "1"},
            "checkpoint, run",
            "INIT_CHECKPOINT=/d/w.pt: not a checkpoint",
            "python -m bert --check",
        ),
    ],
)
def test_machine_problems_are_named_with_the_fix(site, broken, check, finding, cure):
    assert_fails(
        doctor(site, "machine", "gpu", "data", CONT="", **broken), check, finding, cure
    )


def test_an_idle_driver_that_unloads_is_a_warning(site):
    done = doctor(site, "gpu", PERSISTENCE="Disabled")
    found = rows(done.stdout)
    assert done.returncode == 0, done.stdout
    assert found["persistence"][0] == "warn"
    assert found["persistence"][2], "with what helps"


def test_data_of_unknown_origin_is_a_warning_with_the_command_that_verifies_it(site):
    (site.root.parent / "data" / "prepared-packed.json").unlink()
    found = rows(doctor(site, "data").stdout)["data manifest"]
    assert found[0] == "warn"
    assert found[2].startswith(
        "if it is NVIDIA's: python -m input_preprocessing import_records"
    )


def test_links_out_of_a_mounted_folder_are_named_with_the_mount_they_need(site):
    folder = site.root.parent
    (folder / "disk").mkdir()
    (folder / "disk" / "shard").touch()
    (folder / "data" / "eval" / "a").symlink_to("file")
    (folder / "data" / "eval" / "b").symlink_to(folder / "disk" / "shard")
    finding = f"has links to {folder}/disk, which is not mounted in the container"
    assert_fails(
        doctor(site, "data"), "EVALDIR", finding, f"CONTAINER_MOUNTS={folder}/disk:ro"
    )
    for given in ({"CONTAINER_MOUNTS": f"/x,{folder}/disk:ro"}, {"CONT": ""}):
        assert rows(doctor(site, "data", **given).stdout)["EVALDIR"][0] == "pass"


@pytest.mark.parametrize(("status", "result"), [(0, "pass"), (1, "fail")])
def test_the_whole_data_set_is_verified_on_request(site, status, result):
    script = site.root / "verify_dataset.sh"
    script.write_text(f'#!/usr/bin/env bash\necho "verdict on $1"\nexit {status}\n')
    script.chmod(0o755)
    done = doctor(site, "verify")
    assert done.returncode == status
    assert rows(done.stdout)["data verified"][:2] == (
        result,
        f"verdict on {site.env['DATADIR']}",
    )


def test_a_login_node_is_not_blamed_for_having_no_gpu(site):
    (site.root.parent / "bin" / "nvidia-smi").unlink()
    done = doctor(site, "gpu", SLURM_PROCID="")
    found = rows(done.stdout)
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a GPU")
    assert done.returncode == 0, done.stdout
    assert found["GPUs"] == (
        "skip",
        "this node submits jobs",
        "srun --exclusive launch/doctor.sh machine gpu data",
    )


def test_without_a_config_only_what_needs_one_is_skipped(site):
    command = ["./launch/doctor.sh", "slurm", "data"]
    done = subprocess.run(
        command,
        cwd=site.root,
        env=site.env,
        capture_output=True,
        text=True,
        check=False,
    )
    found = rows(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["checkpoint, run"][0] == "skip"
    assert "config" in found["checkpoint, run"][2]
    assert found["EVALDIR"][0] == "pass", "env.sh was sourced"
    assert found["training data"][0] == "skip", "which it is, a config says"
    assert found["data manifest"][0] == "pass"


def test_machines_that_ssh_does_not_reach_fail(site):
    site.stand_in(
        "ssh",
        "echo 'ssh: connect to host dgx1 port 22: No route to host' >&2; exit 255",
    )
    done = doctor(site, "ssh", HOSTS="dgx1")
    assert_fails(
        done,
        "ssh",
        "dgx1: ssh cannot connect (ssh: connect to host dgx1 port 22: No route to host)",
        "",
    )


def test_an_unknown_group_is_wrong_usage(site):
    done = doctor(site, "disk")
    assert done.returncode == 2
    assert (
        done.stderr
        == "run: error: disk: expected one of slurm container ssh machine gpu data verify\n"
    )


def assert_fails(done, check: str, finding: str, cure: str) -> None:
    found = rows(done.stdout)
    assert done.returncode == 1, done.stdout + done.stderr
    assert not done.stderr
    assert found[check][0] == "fail", done.stdout
    assert finding in found[check][1]
    assert cure in found[check][2]


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("setting", "check", "result", "finding"),
    [
        ({}, "gres", "pass", "8 x gpu a node"),
        ({"GPU_GRES": "gpu:h100"}, "gres", "pass", "8 x gpu:h100 a node"),
        (
            {"GPU_GRES": "gpu:a100"},
            "gres",
            "fail",
            "the nodes have no gpu:a100, but gpu:h100:8",
        ),
        (
            {"DGXNGPU": "16"},
            "gres",
            "fail",
            "a node has 8 x gpu and the config wants DGXNGPU=16",
        ),
        ({}, "partition", "pass", "2 nodes of gpu:h100:8"),
        (
            {"DGXNNODES": "3"},
            "partition",
            "fail",
            "has 2 nodes and the config wants DGXNNODES=3",
        ),
        ({"SBATCH_PARTITION": "none"}, "partition", "fail", "none: no such partition"),
        ({"CONT": "image"}, "pyxis", "pass", ""),
    ],
)
def test_a_real_slurm_is_checked_as_run_sub_uses_it(
    slurm, setting, check, result, finding
):
    after = "".join(
        f"export {name}={value}; "
        for name, value in ({"DGXNGPU": "8"} | setting).items()
    )
    done = slurm.checkout.run("./launch/doctor.sh slurm", after=after)
    found = rows(done.stdout)
    assert done.returncode == (result == "fail"), done.stdout + done.stderr
    assert found["slurm"][0] == "pass"
    assert found[check][0] == result, done.stdout
    assert finding in found[check][1]


@pytest.mark.slurm
def test_the_nodes_of_a_real_slurm_are_checked_by_a_step(slurm):
    command = "srun --nodes=2 --ntasks-per-node=1 ./launch/doctor.sh machine gpu"
    done = slurm.checkout.run(
        command, after="export DEVICE=cpu", PYTHON="python", LOGDIR=str(slurm.folder)
    )
    for node in ("dgx1", "dgx2"):
        assert done.stdout.count(f"{node}: pass  LOGDIR ") == 1, (
            done.stdout + done.stderr
        )
        assert done.stdout.count(f"{node}: skip  GPUs                  DEVICE=cpu") == 1
