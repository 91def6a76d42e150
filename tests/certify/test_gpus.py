"""Where a GPU belongs, a test that finds none fails; on a machine without one, or on request, it tests the CPUs."""

import os
import subprocess

import pytest

DEAD = '#!/bin/sh\necho "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."\nexit 9\n'
ALIVE = "#!/bin/sh\nprintf '0\\n1\\n'\n"


def bash(repository, sources, script, **environ):
    """A script's status and output, after these files of launch/."""
    read = "; ".join(f"source {repository}/launch/{name}" for name in sources)
    command = ["bash", "-euo", "pipefail", "-c", f"{read}; {script}"]
    environ = {"PATH": os.environ["PATH"]} | environ
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def ask(repository, folder, smi=DEAD, **environ):
    """The function's status and output, then DEVICE, with a stand-in for nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(smi)
    program.chmod(0o755)
    script = f"certify::require_gpus {folder}; echo device=${{DEVICE:-}}"
    environ |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    sources = ["load.sh run/log run/python run/certify"]
    return bash(repository, sources, script, **environ)


def on_bus(folder, vendor, kind):
    device = folder / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x1002", "0x120000"), ("0x1002", "0x038000"), ("0x1da3", "0x120000")],
)  # fmt: skip
def test_a_gpu_on_the_bus_that_no_driver_runs_fails_with_the_drain_line(
    repository, tmp_path, vendor, kind
):
    on_bus(tmp_path, vendor, kind)
    done = ask(repository, tmp_path)
    assert done.returncode == 1
    words = "nvidia-smi lists no GPU, but one is on the PCI bus (0000:3b:00.0)"
    assert done.stdout.startswith(f"fail: node {os.uname().nodename}: {words}; ")
    assert f"state=drain 'reason=certify: {words}'" in done.stdout


@pytest.mark.parametrize(
    ("environ", "folder", "said"),
    [
        ({"SLURM_JOB_GPUS": "0,1"}, "", "Slurm allocated some"),
        ({"SLURM_GPUS_ON_NODE": "8"}, "", "Slurm allocated some"),
        ({"DGXSYSTEM": "P8000H100"}, "", "the config of P8000H100 is for GPUs"),
        ({}, "proc/driver/nvidia", "the NVIDIA driver is loaded"),
    ],
)
def test_a_job_config_or_driver_of_gpus_fails_without_one(
    repository, tmp_path, environ, folder, said
):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    done = ask(repository, tmp_path, **environ)
    assert (done.returncode, said in done.stdout) == (1, True)


@pytest.mark.parametrize(
    ("smi", "environ", "device"),
    [
        (DEAD, {}, ""),
        (DEAD, {"DEVICE": "cpu", "DGXSYSTEM": "A", "SLURM_JOB_GPUS": "0"}, "cpu"),
        (DEAD, {"DEVICE": "auto", "DGXSYSTEM": "demo"}, "auto"),
        (ALIVE, {}, "cuda"),
        (ALIVE, {"DEVICE": "auto"}, "cuda"),
    ],
)
def test_cpus_are_tested_without_any_gpu_or_on_request_and_gpus_wherever_there_are_some(
    repository, tmp_path, smi, environ, device
):
    # The display of a server's management controller.
    on_bus(tmp_path, "0x1a03", "0x030000")
    done = ask(repository, tmp_path, smi, **environ)
    assert (done.returncode, done.stdout) == (0, f"device={device}\n")


def test_help_prints_the_head_of_the_script(repository):
    command = [repository / "certify.sh", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--quick" in shown
    assert "Exit status" in shown
    assert "set -euo" not in shown


BOTH = "CERTIFY_MINUTES=15 and CERTIFY_SECONDS=2 (2 by --quick): give one"


@pytest.mark.parametrize(
    ("minutes", "environ", "status", "said"),
    [
        ("15", {}, 0, "90\n"),
        ("15", {"DGXNNODES": "4"}, 0, "75\n"),
        ("1", {"DGXNGPU": "64"}, 0, "1\n"),
        ("soon", {}, 2, "CERTIFY_MINUTES='soon': expected"),
        ("15", {"CERTIFY_SECONDS": "2"}, 2, BOTH),
    ],
)
def test_the_stages_share_the_minutes(repository, minutes, environ, status, said):
    environ = {"DGXNGPU": "8", "DGXNNODES": "1"} | environ
    script = "certify::share_minutes; echo $CERTIFY_SECONDS"
    sources = ["run/log.sh", "run/certify.sh"]
    done = bash(repository, sources, script, CERTIFY_MINUTES=minutes, **environ)
    assert (done.returncode, said in done.stdout + done.stderr) == (status, True)
    assert done.stdout == said * (status == 0)
