"""The table of doctor.sh: a row for each check of this site, with what cures it. What a run
checks in its first minute, such as its machines and its image, is not here. Of the machine's own Python, from 3.6 on.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ENV = os.environ
LAUNCH = Path(__file__).resolve().parent
SYSFS = Path(ENV.get("SYSFS", "/sys"))
# With several nodes at once, each prefixes its lines with its name.
HOST = ENV.get("SLURMD_NODENAME") or os.uname().nodename
NODE = f"{HOST}:" if int(ENV.get("SLURM_STEP_NUM_TASKS") or 1) > 1 else ""
SOURCE = "source env.sh; source configs/config_<SYSTEM>_....sh"
SYSCTL = "sudo -n /sbin/sysctl -q vm.drop_caches=3"  # as node/drop_caches.sh
PYTHON = ENV.get("PYTHON", "python")
counts: "Counter[str]" = Counter()


def row(result: str, check: str, finding: str, cure: str = "") -> None:
    print(f"{NODE} {result:<4}  {check:<21} {finding}", flush=True)
    if cure:
        print(f"{NODE}       {'':<21} -> {cure}", flush=True)
    counts[result] += 1


def call(*words: str) -> "tuple[bool, str]":
    """Did a command succeed, and what did it print?"""
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return False, str(error)
    return done.returncode == 0, done.stdout.decode(errors="replace").strip()


def settings() -> None:
    """The run scripts' own check of names and values."""
    good, text = call(str(LAUNCH / "doctor.sh"), "--settings")
    problem = text.rpartition("run: error: ")[2]
    finding = "no exported name looks misspelt" if good else problem
    row("pass" if good else "fail", "variables", finding)


def number(name: str) -> int:
    """A setting that is at least 1."""
    return max(int(re.sub(r"\D", "", ENV.get(name, "")) or 1), 1)


def on_compute_node() -> bool:
    """Rather than a submit node?"""
    # A step has a number; a submit node may still have a GPU for tests.
    slurm = shutil.which("sbatch") and not ENV.get("SLURM_PROCID")
    return not slurm or os.path.exists("/dev/nvidiactl")


def slurm() -> None:
    if not shutil.which("sbatch"):
        needless = "run_local.sh, run_with_docker.sh and run_multinode.sh need none"
        return row("skip", "slurm", f"no sbatch here: {needless}")
    query = ["sinfo", "--noheader", "--format=%R|%a|%D|%G|%P"]
    good, text = call("timeout", "20", *query)
    if not good:
        cure = "SLURM_CONF: the right cluster? There: systemctl status slurmctld munge"
        return row("fail", "slurm", f"sinfo: {text.rpartition(': ')[2]}", cure)
    lines = [line.split("|") for line in text.splitlines()]
    row("pass", "slurm", f"{call('sinfo', '--version')[1]}, {len(lines)} partitions")
    name = ENV.get("SBATCH_PARTITION", "")
    found = [words for words in lines if words[0] == name]
    if not name:
        # sinfo marks Slurm's default with a star.
        found = [words for words in lines if words[-1].endswith("*")]
    if not found:
        names = "|".join(sorted({words[0] for words in lines}))
        cure = f"in env.sh: export SBATCH_PARTITION={names}"
        return row("fail", "partition", f"'{name}': no such partition", cure)
    name, state, nodes, gres, _ = found[0]
    if state != "up":
        cure = f"scontrol update PartitionName={name} State=UP"
        row("fail", "partition", f"{name} is {state}", cure)
    elif int(nodes) < number("DGXNNODES"):
        wanted = f"the config wants DGXNNODES={number('DGXNNODES')}"
        row("fail", "partition", f"{name} has {nodes} nodes and {wanted}")
    else:
        row("pass", "partition", f"{name}, {nodes} nodes of {gres}")


def machine() -> None:
    # Slurm's steps inherit the limit of slurmd or of the submitting shell.
    limit = call("bash", "-c", "ulimit -l")[1]
    if limit != "unlimited" and (SYSFS / "class/infiniband").exists():
        cure = "in /etc/security/limits.d: '* - memlock unlimited'; for Slurm: PropagateResourceLimitsExcept=MEMLOCK"
        row("fail", "memlock", f"{limit} KB: InfiniBand cannot pin its buffers", cure)
    drop_caches()


def drop_caches() -> None:
    """Could the page caches be dropped? Does not drop them."""
    kernel = Path(ENV.get("PROC_SYS", "/proc/sys")) / "vm/drop_caches"
    command = SYSCTL.split()[2:]
    if os.access(str(kernel), os.W_OK) or call("sudo", "-n", "-l", *command)[0]:
        return row("pass", "drop caches", SYSCTL)
    cure = f"visudo: {ENV.get('USER', 'USER')} ALL=(root) NOPASSWD: {' '.join(command)}"
    finding = f"'{SYSCTL}' is not allowed: a closed run on GPUs does not start"
    result = "fail" if ENV.get("CLEAR_CACHES") == "require" else "warn"
    row(result, "drop caches", finding, cure)


def gpu() -> None:
    if ENV.get("DEVICE") == "cpu":
        return row("skip", "GPUs", "DEVICE=cpu")
    if not on_compute_node():
        cure = "srun --exclusive launch/doctor.sh machine gpu data"
        return row("skip", "GPUs", "this node submits jobs", cure)
    fields = "--query-gpu=name,memory.total,driver_version"
    good, text = call("nvidia-smi", fields, "--format=csv,noheader,nounits")
    if not good:
        cure = "install or reload the driver, or: export DEVICE=cpu"
        return row("fail", "GPUs", text.rpartition("\n")[2], cure)
    gpus = [line.split(", ") for line in text.splitlines()]
    # Two kinds of GPU in one node are shown as such.
    kinds = sorted({words[0] for words in gpus})
    _, memory, driver = gpus[0]
    finding, wanted = f"{len(gpus)} x {'/'.join(kinds)}, {memory} MB", number("DGXNGPU")
    if len(gpus) < wanted:
        finding += f" and the config wants DGXNGPU={wanted}"
        row("fail", "GPUs", finding, "source a smaller config")
    else:
        row("pass", "GPUs", finding)
    row("pass", "driver", driver)


def data() -> None:
    """What the trainer's check needs first, and that check."""
    # Synthetic data need no folders.
    synthetic = ENV.get("SYNTH_DATA", "0") != "0"
    for name in () if synthetic else ("EVALDIR", "CHECKPOINTDIR_PHASE1"):
        place = Path(ENV.get(name, ""))
        if not ENV.get(name) or not any(place.glob("*")):
            cure = "input_preprocessing/prepare_data.sh --outputdir DIR [--packed-data]"
            row("fail", name, f"{place}: no such folder here, or empty", cure)
    trainer()


def trainer() -> None:
    """The trainer's own check of settings, data, vocabulary and weights."""
    if not (ENV.get("DGXSYSTEM") and ENV.get("DGXNGPU")):
        return row("skip", "checkpoint, run", "no config was sourced", SOURCE)
    # Without importing torch, which takes seconds.
    find = "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))"
    if not call(PYTHON, "-c", find)[0]:
        later = "run.sub does this in the container before it starts"
        result, cure = ("skip", later) if ENV.get("CONT") else ("fail", "make setup")
        return row(result, "checkpoint, run", f"{PYTHON} has no torch", cure)
    # Without RUN_DIR: there is no run yet whose folder could be another's.
    paths = f"PYTHONPATH={LAUNCH.parent}/implementations:{LAUNCH.parent}"
    good, text = call("env", paths, "RUN_DIR=", PYTHON, "-m", "bert", "--check")
    if not good:
        finding = text.rpartition("bert: error: ")[2]
        return row("fail", "checkpoint, run", finding, "python -m bert --check")
    told = dict(re.findall(r"^(weights|global batch)\s+(.*)", text, re.MULTILINE))
    row("pass", "weights", told.get("weights", ""))
    row("pass", "run", told.get("global batch", ""))


def verify() -> None:
    """Reads the whole data set."""
    place = ENV.get("DATADIR", "")
    command = f"{LAUNCH.parent}/verify_dataset.sh"
    good, text = call(command, place)
    cure = "" if good else f"./verify_dataset.sh {place}, DATADIR in env.sh"
    row("pass" if good else "fail", "data verified", text.rpartition("\n")[2], cure)


EVERY = (slurm, machine, gpu, data, verify)
GROUPS = {group.__name__: group for group in EVERY}


def main(*chosen: str) -> int:
    for group in chosen:
        if group not in GROUPS:
            expected = f"expected one of {' '.join(GROUPS)}"
            print(f"run: error: {group}: {expected}", file=sys.stderr)
            return 2
    print(f"{NODE} {os.uname().nodename} {ENV.get('DGXSYSTEM', '')}")
    settings()
    for group in chosen or tuple(GROUPS)[:-1]:
        GROUPS[group]()
    print(f"{NODE} {counts['fail']} failed, {counts['warn']} warnings")
    return counts["fail"] > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
