"""Faults meet phases, platforms and features: whatever happens, the same promises hold afterwards.

MEETINGS_SEED draws the rows; the rows of machines without Slurm are few here, and all are run by
``make test-meetings``.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ..disks import small_disk
from ..waiting import wait_until
from .captured import captured
from .conftest import FAKES, OVER, Job, make_checkout
from .fakes.stepper import EVERY, STEPS, advance
from .meetings import SLURM, Row, covering, pairs, possible_rows
from .nodes import Nodes, pyxis, running
from .platforms import SSH
from .test_slurm_container import ENROOT
from .test_slurm_nodes import NODES, QUICK

SEED, FAST = int(os.environ.get("MEETINGS_SEED", "1")), 3
OWN_SEED, DISK = 5, 1 << 20
# Every bash reads this first: holds a script of a phase, like hold() of the trainer's stand-in.
HOOK = """
mapfile -d '' -t hook_words </proc/$$/cmdline
hook_pattern='%s'
if [[ ${hook_words[*]} == *$hook_pattern ]] && (set -o noclobber && : >%s/held) 2>/dev/null; then
  until [[ -e %s/go ]]; do sleep 0.05; done
fi
unset hook_words hook_pattern
"""
HELD = {
    "staging": "/stage.sh *", "cleanup": "/cleanup.sh now", "container": "bin/apptainer exec *true",
}  # fmt: skip
STRUCK = ("power off node", "power off batch host", "power off spare", "cut network", "node returns", "bad spare")  # fmt: skip


def test_the_rows_cover_all_possible_pairs_and_follow_from_the_seed():
    rows, possible = covering(SEED), possible_rows()
    every = {pair for row in possible for pair in pairs(row)}
    assert {pair for row in rows for pair in pairs(row)} == every
    assert set(rows) <= set(possible)
    assert len(rows) < 150
    assert rows == covering(SEED) != covering(SEED + 1)


def processes(*words: str) -> str:
    """Running processes with one of the words in their command line."""
    return captured(["pgrep", "-af", "|".join(words)]).stdout


class Meeting:
    """A run with stand-ins in a folder of its own, beside things that belong to others."""

    def __init__(self, repository: Path, folder: Path, row: Row, disk: Path) -> None:
        self.row, self.folder, self.disk = row, folder, disk
        place = disk if row.event == "full disk" else folder
        self.results = place / f"results_{folder.name}"
        self.saved, self.hold = place / f"saved_{folder.name}", folder / "hold"
        for name in ("data", "eval", "hold", "stage/other"):
            (folder / name).mkdir(parents=True)
            (folder / name / "file").write_text(name)
        self.checkout = make_checkout(repository, folder)
        self.checkout.root = self.checkout.root.rename(folder / "checkout")
        self.stand_ins()
        self.others = [folder / "stage" / "other", self.results / "other", self.saved]
        (self.results / "other").mkdir(parents=True)
        (self.results / "other" / "result_0.txt").write_text("of another run\n")
        if row.checkpoints != "new":
            self.saved.mkdir()
            state = {"step": 10, "seed": OWN_SEED, "lr": row.checkpoints, "owner": {}}
            state["state"] = advance(OWN_SEED, "", 1, 10)
            (self.saved / "step_00000010.pt").write_text(json.dumps(state))
        if not row.refused:
            self.others.pop()
        self.before = self.kept()

    def stand_ins(self) -> None:
        root, binaries = self.checkout.root, self.checkout.root.parent / "bin"
        for trainer in ("bert", "certify"):
            program = root / "implementations" / trainer / "__main__.py"
            shutil.copy(FAKES / "stepper.py", program)
        review = root / "review" / "__main__.py"
        hold = "import sys\nfrom bert.__main__ import hold\nif sys.argv[1] == 'show': hold('end')\n"
        review.write_text(hold + review.read_text())
        guard = root / "launch" / "slurm" / "guard.sh"
        guard.write_text(guard.read_text().replace("INTERVAL=20", "INTERVAL=3"))
        # Machines without Slurm are one, whose disk they would fill at the same time.
        stage = root / "launch" / "node" / "stage.sh"
        one_by_one = f"shift\nexec {{lock}}<{self.folder}/stage && flock $lock\n"
        stage.write_text(stage.read_text().replace("shift\n", one_by_one, 1))
        (binaries / "sync").unlink()
        pattern = HELD.get(self.row.phase, "no such command")
        (self.folder / "hook.sh").write_text(HOOK % (pattern, self.hold, self.hold))
        ssh = SSH.replace("OF_HOST", f"BASH_ENV={self.folder}/hook.sh OF_HOST")
        ssh = ssh.replace("exec setsid --wait", "setsid --fork --wait").rstrip()
        lost = f"[[ $host == dgx2 && -e {self.hold}/lost ]] && exit 255"  # as ssh does
        ended = f"{{ status=$?; {lost}; exit $status; }}"
        self.checkout.stand_in("ssh", f"{ssh} || {ended}\n")
        self.checkout.stand_in("enroot", ENROOT)
        program = f'exec "$REAL_PYTHON" -S "{FAKES}/container.py" apptainer "$@"'
        self.checkout.stand_in("apptainer", program)
        (self.folder / "image").touch()
        (self.folder / "calls").touch()
        if self.row.phase == "container":
            (self.folder / "hold_container").touch()

    def kept(self) -> dict[str, bytes]:
        """What belongs to others."""
        every = [path for other in self.others for path in other.rglob("*")]
        return {str(path): path.read_bytes() for path in every if path.is_file()}

    def settings(self) -> dict[str, str]:
        row, folder = self.row, self.folder
        chosen = {
            "DGXNNODES": "1" if row.runtime == "local" else "2", "NEXP": row.trials, "RESUME": row.resume,
            "DGXNGPU": "2" if row.runtime == "local" else "1", "SEED": str(OWN_SEED) if row.seed == "set" else "",
            "LR": "own", "CHECKPOINT_DIR": str(self.saved), "DIST_TIMEOUT": "12" if row.runtime in SLURM else "6", "DEVICE": "cpu", "HOLD": row.phase,
            "HOLD_DIR": str(self.hold), "DATADIR_PHASE2_PACKED": str(folder / "data"), "EVALDIR": str(folder / "eval"),
            "STAGE_DIR": "/dev/shm/stage" if row.runtime in SLURM else str(folder / "stage"), "NCCL_TEST": "0",
            "INIT_CHECKPOINT": "", "CHECK_COMPLIANCE": "0", "CLEAR_CACHES": "0", "TARGET_MLM_ACCURACY": "0",
            "START_TEST": str(int(row.phase == "start test")), "RUN_NAME": "run", "LOGDIR": str(self.results),
            "SUBMISSION_DIVISION": "open",
        }  # fmt: skip
        if row.runtime in ("pyxis", "apptainer"):
            chosen |= {"CONT": str(folder / "image"), "CONTAINER_RUNTIME": row.runtime}
            chosen["CONTAINER_MOUNTS"] = f"{self.hold},{self.saved.parent}"
        if row.runtime in SLURM:
            chosen["SPARE_NODES"] = row.spares
        if row.runtime == "ssh":
            chosen |= {"HOSTS": "dgx1 dgx2", "MASTER_ADDR": "127.0.0.1"}
        return chosen

    def submit(self, script: str, **env: str) -> subprocess.Popen[str]:
        exports = " ".join(f"{key}='{value}'" for key, value in self.settings().items())
        root = self.checkout.root
        env |= {"BASH_ENV": str(self.folder / "hook.sh")}
        env["PYTHONPATH"] = f"{root}:{root}/implementations"
        return self.checkout.popen(script, after=f"export {exports}", **env)

    def go(self) -> None:
        """Lets the run go on, or has the rank that waits end or stop itself."""
        (self.hold / "answer").write_text(self.row.event)
        (self.hold / "answer").rename(self.hold / "go")

    def fill(self) -> None:
        with suppress(OSError), open(self.disk / "filler", "wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass

    def judge(self, succeeded: bool, said: str) -> None:
        """The promises that hold whatever happened."""
        (self.disk / "filler").unlink(missing_ok=True)
        row, last = self.row, said.strip().splitlines()[-1]
        who = "run: all 3 trials" if row.trials == "3" else "run: the trial"
        assert last.startswith(f"{who} trained to the last step") == succeeded, said
        assert last.startswith("run: error: ") != succeeded, said
        assert row.finishes in (None, succeeded), said
        assert "is repeated" not in said, "it continues from a checkpoint"
        seeds = set()
        for path in (self.results / "run").glob("result_*.txt"):
            seed, state = path.read_text().split()
            undisturbed = advance(int(seed), "", 1, STEPS)
            assert state == undisturbed
            assert row.seed == "unset" or int(seed) == OWN_SEED + int(path.stem[7:])
            assert seed not in seeds, "two trials with one history"
            seeds.add(seed)
        assert len(seeds) == int(row.trials) or not succeeded, said
        self.judge_history()
        assert self.kept() == self.before, "what belongs to others"

    def judge_history(self) -> None:
        """No more is lost than what came after the last checkpoint."""
        reached = dict[str, int]()
        path = self.hold / "history"
        for line in path.read_text().splitlines() if path.exists() else ():
            trial, *words = line.split()
            if words[0] == "start":
                assert int(words[1]) >= reached.get(trial, 0) - EVERY, path.read_text()
            reached[trial] = int(words[-1])


def run_here(meeting: Meeting) -> None:
    """A row of a platform without a scheduler."""
    row, held = meeting.row, meeting.hold / "held"
    script = "./run_local.sh" if row.runtime == "local" else "./run_multinode.sh"
    process = meeting.submit(script)
    wait_until(lambda: held.exists() or process.poll() is not None, 120)
    if row.event == "cancel":
        process.send_signal(signal.SIGTERM)
    elif row.event == "full disk":
        meeting.fill()
    elif row.event in ("cut network", "power off node"):
        client = f"setsid --fork --wait .* OF_HOST=dgx2 .*{meeting.folder}.* watch "
        # The machine that is held may be faster than the other one.
        wait_until(lambda: processes(client), 30, every=0.1)
        (meeting.hold / "lost").touch()
        for line in processes(client).splitlines():
            number = line.split()[0]
            if row.event == "power off node":
                subprocess.run(["pkill", "-KILL", "-P", number], check=False)
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
    meeting.go()
    out, err = process.communicate(timeout=120)
    meeting.judge(process.returncode == 0, err)
    wait_until(lambda: not processes(str(meeting.folder)), 60, every=0.3)
    assert [path.name for path in (meeting.folder / "stage").iterdir()] == ["other"]
    assert "Traceback" not in out + err


class SlurmMeeting(Meeting):
    """A row on the Slurm of separate nodes."""

    def __init__(self, nodes: Nodes, row: Row, folder: Path, disk: Path) -> None:
        super().__init__(nodes.repository, folder, row, disk)
        self.nodes, self.struck = nodes, set[str]()
        for node in range(1, NODES + 1):
            for other in self.others_on(node):
                other.mkdir(parents=True, exist_ok=True)
        self.checkout.env |= {
            "SLURM_CONF": nodes.environ["SLURM_CONF"], "PYXIS_TEST": str(folder), "SBATCH_TIMELIMIT": "10",
        }  # fmt: skip

    def others_on(self, node: int) -> tuple[Path, Path]:
        """Staged data and a container of somebody else."""
        staged = self.nodes.folder / "node" / str(node) / "shm" / "stage" / "other"
        return staged, self.folder / f"enroot/node{node}/pyxis_other"

    def start(self) -> None:
        count = self.settings()["DGXNNODES"] + f"+{self.row.spares}"
        options = f"--parsable -N $(({count})) --output={self.folder}/job.out"
        out, err = self.submit(f"sbatch {options} run.sub").communicate(timeout=60)
        assert out.strip().isdigit(), err
        self.job = Job(int(out), self.folder / "job.out")

    def strike(self) -> None:
        """What happens when the phase is reached."""
        event, used = self.row.event, self.nodes.names(self.job.field("NodeList"))
        host = self.job.field("BatchHost")
        assert used[0] == host
        spare = used[min(2, len(used) - 1)]
        others = {"power off batch host": host, "power off spare": spare}
        victim = others.get(event, used[1])
        number = victim.removeprefix("node")
        if event in STRUCK:
            self.struck |= {victim}
        if event == "bad spare":
            self.struck |= {spare}
            hidden = str(self.checkout.root / "launch")
            mount = ("mount", "-t", "tmpfs", "none", hidden)
            assert self.nodes.enter(spare, *mount).returncode == 0
        if event.startswith("power off") or event in ("node returns", "bad spare"):
            self.nodes.call("poweroff", number)
        elif event == "cut network":
            self.nodes.call("cut", number)
        elif event in ("cancel", "time limit"):
            options = [] if event == "cancel" else ["--batch", "--signal=USR1"]
            subprocess.run(["scancel", *options, str(self.job.number)], check=True)
        elif event == "full disk":
            self.fill()
        elif event == "controller down":
            self.nodes.controller("down")
        self.go()
        if event == "controller down":
            time.sleep(8)
            self.nodes.controller("up")
        elif event == "node returns":
            # Ranks miss each other. Otherwise Slurm tells a reboot by the boot time, which these
            # nodes share.
            if self.row.trains:
                time.sleep(8)
            else:
                wait_until(lambda: self.nodes.state(int(number)).startswith("down"))
            self.nodes.call("start", number)

    def mine(self) -> str:
        """Processes of the job on any node."""
        # Other clusters beside this one have jobs of the same number.
        script = f"{self.nodes.folder}/spool/.*/job0*{self.job.number}/slurm_script"
        return processes(str(self.folder), script)

    def wait(self) -> None:
        """Until the job has ended; it may be requeued, and is never said to run without a process."""
        alive = time.monotonic()
        end = alive + 200  # nothing waits for minutes
        while time.monotonic() < end:
            state = self.job.field("JobState")
            if state in OVER and self.job.field("EndTime") != "Unknown":
                return
            works = any("/guard.sh" not in line for line in self.mine().splitlines())
            if state != "RUNNING" or works:
                alive = time.monotonic()
            silent = time.monotonic() > alive + 60
            assert not silent, f"RUNNING without a process:\n{self.job.output}"
            if state == "PENDING" and "BeginTime" in self.job.field("Reason"):
                job = f"JobId={self.job.number}"
                line = ["scontrol", "update", job, "StartTime=now+3"]
                subprocess.run(line, check=True)
            time.sleep(0.5)
        raise AssertionError(f"did not end: {state}\n{self.job.output}\n{self.mine()}")

    def run(self) -> None:
        self.start()
        self.job.wait_for((self.hold / "held").exists)
        self.strike()
        self.wait()
        self.judge(self.job.field("JobState") == "COMPLETED", self.job.output)
        whole = [n for n in range(1, NODES + 1) if f"node{n}" not in self.struck]
        wait_until(lambda: not self.left(whole), 60)

    def left(self, nodes: list[int]) -> str:
        """What is left on these nodes."""
        files = []
        for node in nodes:
            for other in self.others_on(node):
                assert other.exists(), "what belongs to others"
                files += [str(path) for path in other.parent.iterdir() if path != other]
        found = [] if self.row.event == "cut network" else self.mine().splitlines()
        return "\n".join([*files, *found])


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system, which all machines share."""
    folder = tmp_path_factory.mktemp("disks") / "disk"
    with small_disk(folder, DISK):
        yield folder


@pytest.fixture(scope="module")
def nodes(repository, disk, tmp_path_factory) -> Iterator[Nodes]:
    """The cluster, created once, with a pyxis that each row plays."""
    folder = tmp_path_factory.mktemp("nodes")
    script = folder / "pyxis.sh"
    hold = 'if [[ -e $PYXIS_TEST/hold_container ]] && (set -o noclobber && : >"$PYXIS_TEST/hold/held") 2>/dev/null; then\n'
    hold += '  until [[ -e $PYXIS_TEST/hold/go ]]; do sleep 0.05; done\nfi\n  record "create '
    text = (FAKES / "pyxis.sh").read_text()
    script.write_text(text.replace('  record "create ', hold))
    plugins = f"PlugStackConfig={pyxis(folder, script)}"
    with running(repository, folder, NODES, EXTRA=plugins, **QUICK) as made:
        yield made


ROWS = list(enumerate(covering(SEED)))
HERE = [(number, row) for number, row in ROWS if row.runtime not in SLURM]
# Drawn by few seeds.
FIXED = Row("local", "start test", "kill", "1", "1", "0", "set", "new")


def named(rows: list[tuple[int, Row]]) -> list[object]:
    """Parameters whose names tell the row, as pytest -k finds it."""
    return [pytest.param(n, row, id=f"row{n}: {', '.join(row)}") for n, row in rows]


def announce(number: int) -> None:
    """Shown if it fails."""
    print(f"again: MEETINGS_SEED={SEED} make test-meetings ROW={number}")


@pytest.mark.parametrize(("number", "row"), named([(len(ROWS), FIXED), *HERE[:FAST]]))
def test_a_few_rows_of_machines_without_slurm(repository, tmp_path, disk, number, row):
    announce(number)
    run_here(Meeting(repository, tmp_path, row, disk))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "row"), named(HERE[FAST:]))
def test_the_others_without_slurm(repository, tmp_path, disk, number, row):
    announce(number)
    run_here(Meeting(repository, tmp_path, row, disk))


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "row"), named([one for one in ROWS if one not in HERE]))  # fmt: skip
def test_rows_of_slurm(nodes, tmp_path, disk, number, row):
    announce(number)
    nodes.bring_back()
    meeting = SlurmMeeting(nodes, row, tmp_path, disk)
    try:
        meeting.run()
    finally:
        subprocess.run(["scancel", "--full", "--user", "root"], check=False)
        for node in meeting.struck:
            nodes.call("poweroff", node.removeprefix("node"))
            nodes.call("start", node.removeprefix("node"))
