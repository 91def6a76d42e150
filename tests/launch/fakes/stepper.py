"""Stands in for pretraining where runs are disturbed: two ranks that step together over TCP, save,
resume, refuse and hang.

Its contract with the launcher and its rules of whose a checkpoint is are the trainer's, for the
open division.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

STEPS, EVERY = 30, 5
stopping = False


def advance(seed: int, start: str, first: int, last: int) -> str:
    """The state after the steps ``first`` to ``last``: all that came before decides it."""
    for step in range(first, last + 1):
        start = hashlib.sha256(f"{seed} {start} {step}".encode()).hexdigest()
    return start


def hold(phase: str) -> None:
    """Tells the test that the phase is reached, once, and waits for its answer, which may end it."""
    folder = Path(os.environ["HOLD_DIR"])
    if phase != os.environ["HOLD"]:
        return
    try:
        (folder / "held").touch(exist_ok=False)
    except FileExistsError:
        return
    while not (folder / "go").exists():
        time.sleep(0.02)
    answers = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}
    if number := answers.get((folder / "go").read_text()):
        os.kill(os.getpid(), number)


class Run:
    """One rank of a trial."""

    def __init__(self) -> None:
        self.rank, self.trial = int(os.environ.get("RANK", "0")), os.environ["TRIAL"]
        self.folder = Path(os.environ["RUN_DIR"])
        self.timeout = int(os.environ["DIST_TIMEOUT"])
        trains = self.folder.name.startswith("running_")
        run = self.folder.parent if trains else self.folder
        self.owner = {"trial": self.trial, "run": str(run)}
        self.saved = Path(os.environ["CHECKPOINT_DIR"])
        if self.trial != "0":
            self.saved /= f"trial_{self.trial}"
        self.history = Path(os.environ["HOLD_DIR"]) / "history"

    def fail(self, status: int, reason: str) -> None:
        try:
            with open(self.folder / f"error_{self.trial}.txt", "x") as file:
                file.write(reason + "\n")
        finally:
            sys.exit(status)

    def connect(self) -> None:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if self.rank == 0:
            server = socket.create_server(("", address[1]))
            server.settimeout(self.timeout)
            self.peer = server.accept()[0]
        for _ in range(50 * self.timeout if self.rank else 0):
            try:
                self.peer = socket.create_connection(address)
                break
            except OSError:
                time.sleep(0.02)
        self.peer.settimeout(self.timeout)

    def meet(self) -> bool:
        """A collective: whether a rank wants to stop."""
        try:
            self.peer.sendall(b"01"[stopping : stopping + 1])
            told = self.peer.recv(1)
        except OSError:
            told = b""
        if told:
            return stopping or told == b"1"
        rank = 1 - self.rank
        (self.folder / f"hang_{self.trial}.txt").write_text(f"did not reach all_reduce:\nrank {rank}\n")  # fmt: skip
        self.fail(4, f"rank {rank} did not reach all_reduce")
        return True

    def resume(self) -> tuple[int, int, str]:
        """Step, seed and state to continue from; refuses those of another run."""
        seed = int(os.environ["SEED"]) if os.environ.get("SEED") else None
        found = sorted(self.saved.glob("step_*.pt"))
        if not found:
            seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
            return 0, seed, ""
        state = json.loads(found[-1].read_text())
        if os.environ.get("RESUME") != "1" and state["owner"] != self.owner:
            self.fail(2, f"{self.saved} holds {found[-1].name} of another run")
        if state["lr"] != os.environ["LR"] or seed not in (None, state["seed"]):
            self.fail(2, f"{found[-1]} is of a run with another LR")
        return state["step"], state["seed"], state["state"]

    def save(self, step: int, seed: int, state: str) -> None:
        self.saved.mkdir(parents=True, exist_ok=True)
        text = {"step": step, "seed": seed, "state": state, "owner": self.owner}
        text["lr"] = os.environ["LR"]
        partial = self.saved / ".partial"
        partial.write_text(json.dumps(text))
        hold("checkpoint")
        partial.replace(self.saved / f"step_{step:08d}.pt")

    def note(self, *words: object) -> None:
        with open(self.history, "a") as file:
            file.write(" ".join(map(str, (self.trial, *words))) + "\n")

    def train(self) -> None:
        step, seed, state = self.resume()
        self.connect()
        self.meet()
        if self.rank == 0:
            self.note("start", step)
        phases = {"first step": 1, "training": 12, "evaluation": 20}
        while step < STEPS:
            step += 1
            for phase, at in phases.items():
                if self.rank == 1 and step >= at:
                    hold(phase)
            state = advance(seed, state, step, step)
            ends = self.meet()
            if self.rank == 0:
                self.note(step)
                (self.folder / f"step_{self.trial}.txt").write_text(f"{step}\n")
                if ends or step % EVERY == 0:
                    self.save(step, seed, state)
            if ends:
                self.fail(0, f"stopped at step {step}; RESUME=1 continues")
            time.sleep(0.02)
        if self.rank == 0:
            (self.folder / f"result_{self.trial}.txt").write_text(f"{seed} {state}\n")


def stop(*_: object) -> None:
    global stopping
    stopping = True


def main() -> None:
    if "--check" in sys.argv:
        hold("checks")
        run = Run()
        # A check leaves nothing in the folder that it judges.
        run.fail = lambda status, reason: sys.exit(f"bert: error: {reason}")
        if not (run.folder / f"result_{run.trial}.txt").exists():
            run.resume()
        print("the fit of this configuration")
    elif os.environ.get("RANK_MODULE") == "certify":
        (Path(os.environ["RUN_DIR"]) / "node").write_text("here")
        hold("start test")
    else:
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGUSR1, stop)
        run = Run()
        try:
            run.train()
        except OSError as error:
            run.fail(1, f"{error.strerror}: {error.filename}")


if __name__ == "__main__":
    main()
