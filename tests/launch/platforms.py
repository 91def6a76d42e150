"""What makes a checkout a user's of each platform, with stand-ins for what the platform has."""

from collections.abc import Callable

from .conftest import FAKES, Checkout

PYXIS = "--container-image --container-name --container-mounts --container-writable"
PYXIS += " --no-container-mount-home --container-remap-root"
SCONTROL = """case "$*" in
  'show config') printf '%s\\n' "TaskPlugin = ${TASK_PLUGIN-task/none}" "KillWait = ${KILL_WAIT-30} sec" ;;
  'show hostnames'*) tr , '\\n' <<<"$3" ;;
  'show node'*) echo 'NodeAddr=127.0.0.1 NodeHostName=node0' ;;
  *) exit 1 ;;
esac"""
# Like the real ssh: the command runs in a separate session, which outlives this client and gets no
# signal from it, only the end of its input. A host in DOWN does not answer, one in BLIND lacks the
# repository, one in APART the results, and the ranks of one in LOST end at once, with LOST_STATUS
# and the output SAYS. Each is a machine of its own, but in ONE.
SSH = """
while [[ $1 == -* ]]; do case $1 in -o | -p) shift 2 ;; *) shift ;; esac; done
host=$1
[[ " ${DOWN:-} " != *" $host "* ]] || { echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }
[[ " ${BLIND:-} " != *" $host "* ]] || exit 1
[[ " ${LOST:-} " != *" $host "* || $2 != *" watch "* ]] || { printf '%s' "${SAYS:-}"; exit "${LOST_STATUS:-255}"; }
[[ " ${APART:-} " != *" $host "* || $2 != *" test -w "* ]] || exit 1
if [[ $2 == *"/launch/node/identity.sh "* ]]; then
  cat >/dev/null
  [[ " ${ONE:-} " == *" $host "* ]] && echo one || echo "$host"
  exit
fi
exec setsid --wait env -i PATH="$PATH" HOME="$HOME" REAL_PYTHON="$REAL_PYTHON" FAKE_CALLS="$FAKE_CALLS" \
  OF_HOST="$host" bash -c "$2"
"""
SRUN = (FAKES / "srun.sh").read_text()


def scontrol(slurm: Checkout, case: str) -> None:
    """It answers this, too."""
    text = SCONTROL.replace("*) exit 1", f"{case} ;;\n  *) exit 1")
    slurm.stand_in("scontrol", text)


def srun(slurm: Checkout, before: str) -> None:
    """It does this before it starts tasks."""
    slurm.stand_in("srun", f"{before}\n{SRUN}")


def local(checkout: Checkout) -> Checkout:
    return checkout


def docker(checkout: Checkout) -> Checkout:
    """A docker that runs commands with only what its options pass."""
    checkout.with_containers("docker")
    checkout.script = "./run_with_docker.sh"
    checkout.env["CONT"] = "mlperf-bert"
    return checkout


def apptainer(checkout: Checkout) -> Checkout:
    image = checkout.with_containers("apptainer") / "bert.sif"
    image.touch()
    checkout.script = "./run_with_docker.sh"
    checkout.env |= {"CONTAINER_RUNTIME": "apptainer", "CONT": str(image)}
    return checkout


def ssh(checkout: Checkout) -> Checkout:
    """Two machines, dgx1 and dgx2, which are both this one."""
    checkout.stand_in("ssh", SSH)
    checkout.script = "./run_multinode.sh"
    checkout.size = "DGXNGPU=1 DGXNNODES=2"
    checkout.env |= {"HOSTS": "dgx1 dgx2", "NCCL_TEST": "0"}
    return checkout


def job(checkout: Checkout) -> Checkout:
    """A job of Slurm of one node without gres."""
    srun(checkout, "")
    checkout.stand_in("scontrol", SCONTROL)
    checkout.script = "./run.sub"
    checkout.env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node0"}
    checkout.env |= {"SLURM_JOB_NUM_NODES": "1", "NCCL_TEST": "0"}
    return checkout


def pyxis(checkout: Checkout) -> Checkout:
    """The same with an image and pyxis' options."""
    job(checkout).without_spaces()
    checkout.env |= {"CONT": "mlperf-bert", "SRUN_HELP": PYXIS}
    return checkout


PLATFORMS: dict[str, Callable[[Checkout], Checkout]] = {
    make.__name__: make for make in (local, docker, apptainer, ssh, job, pyxis)
}
