"""Stands in for the trainers, by their contract with the launcher: TRIAL_<N> in the environment
says how a trial goes.

Of pretraining the result is result_N.txt, of fine-tuning model_N/figures.json. A thousand of these are
started: modules that take longer than the rest (pathlib, json, signal) are imported where they are used.
"""

import os
import sys
import time

KEPT = """
    RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT SEED CACHE_CLEARED LR GIVEN_NAMES RUN_DIR
    OMP_NUM_THREADS OMP_WAIT_POLICY SLURMD_NODENAME SLURM_MPI_TYPE CUDA_VISIBLE_DEVICES INSIDE
    TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR CUDA_CACHE_PATH NUMBA_CACHE_DIR
    TASK SEEDS DATA PHASE INIT_CHECKPOINT INIT_OPTIMIZER CHECKPOINT_DIR RESUME MAX_SEQ_LENGTH MAX_STEPS
"""


def check() -> int:
    if os.environ.get("CHECK") == "slow" and "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(900)
    if os.environ.get("CHECK") == "bad":
        print("bert: error: LR='fast': expected a number", file=sys.stderr)
        return 2
    trial = os.environ["TRIAL"]
    if os.environ["RUN_DIR"] and os.environ.get("FINISHED") == f"another:{trial}":
        why = f"trial {trial} is of a run with SEED {os.environ.get('SEED')}"
        print(f"bert: error: {why}", file=sys.stderr)
        return 2
    print("global batch  768 sequences, lr", os.environ.get("LR"))
    return 0


def write(path: str, text: str, mode: str = "w") -> None:
    with open(path, mode) as file:
        file.write(text)


def fail(folder: str, trial: str, status: int, reason: str) -> int:
    from contextlib import suppress

    with suppress(FileExistsError):  # another rank failed first
        write(f"{folder}/error_{trial}.txt", reason + "\n", "x")
    return status


def samples(folder: str, trial: str, count: int) -> str:
    """Waits until every node has so many more power samples; returns the time as an MLLOG field."""
    from pathlib import Path

    nodes, before = int(os.environ["DGXNNODES"]), None
    while True:
        lines = {
            file: len(file.read_text().splitlines())
            for file in Path(folder, f"power_{trial}").glob("*.csv")
        }
        if len(lines) == nodes:
            before = before or lines
            if all(lines[file] >= before[file] + count for file in lines):
                return f'"time_ms": {int(time.time() * 1000)}'
        time.sleep(0.01)


def measured(folder: str, trial: str) -> str:
    """Log of a run that lies within the power samples."""
    start, stop = samples(folder, trial, 2), samples(folder, trial, 3)
    samples(folder, trial, 2)
    head = ':::MLLOG {"namespace": "", "event_type": "INTERVAL_END", '
    tail = '"value": null, "metadata": {"status": "success"}}'
    keys = ("run_start", start), ("run_stop", stop)
    return "".join(f'{head}{at}, "key": "{key}", {tail}\n' for key, at in keys)


def seeds() -> int:
    print("seeds of", sys.argv[-1])
    return 0


def whole(folder: str, trial: str, text: str) -> None:
    """Writes the complete result."""
    write(f"{folder}/result_{trial}.txt", text)
    if os.environ.get("RANK_MODULE") == "finetune":
        os.mkdir(f"{folder}/model_{trial}")
        write(f"{folder}/model_{trial}/figures.json", "{}\n")


def hear(outcome: str, folder: str, trial: str) -> None:
    """Sets the reaction to signals: none, or saving for three seconds, like a large checkpoint."""
    import signal

    def save(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(3)
        write(f"{folder}/saved", "")
        sys.exit(fail(folder, trial, 0, "stopped at step 7"))

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN if outcome == "deaf" else save)


def train() -> int:
    folder, trial = os.environ["RUN_DIR"], os.environ["TRIAL"]
    rank = int(os.environ["RANK"])
    if os.environ.get("RANK_MODULE") == "certify":
        write(f"{folder}/node", os.environ.get("SLURMD_NODENAME", "here"))
        return 0
    outcome, _, culprit = os.environ.get(f"TRIAL_{trial}", "success").partition(":")
    print(f"rank {rank} trains: {outcome}", flush=True)
    if outcome in ("deaf", "saves"):
        hear(outcome, folder, trial)
    seen = {name: os.environ.get(name) for name in KEPT.split()} | {"TRIAL": trial}
    look_for = os.environ.get("LOOK_FOR", "").split(":")
    seen["SEES"] = [path for path in look_for if path and os.path.exists(path)]
    write(os.environ["FAKE_CALLS"], f"rank {seen}\n", "a")
    if rank == 0 and outcome != "no-result":
        write(f"{folder}/result_{trial}.txt", "MLLOG half\n")
        write(f"{folder}/config.json", "{}\n")
        # The claim of a rank that is killed stays.
        write(f"{folder}/.writer_{trial}", "")
    while outcome != "no-result" and not os.path.exists(f"{folder}/result_{trial}.txt"):
        time.sleep(0.01)  # the first collective
    ends = ("kill", "greedy", "exit", "crash", "bad-input")
    if outcome in ends and rank == int(culprit or 0):
        if outcome == "kill":
            os.kill(os.getpid(), 9)
        if outcome == "greedy":
            b"x" * (1 << 30)  # it is killed here
            return 9
        if outcome == "exit":
            return 7
        if outcome == "crash":
            return fail(folder, trial, 1, "the loss is nan at step 3")
        return fail(folder, trial, 2, "DATADIR_PHASE2: truncated")
    hangs = outcome == "hang" and "SLURM_RESTART_COUNT" not in os.environ
    if hangs or outcome in ("kill", "greedy", "exit", "crash", "deaf", "saves"):
        time.sleep(900)  # in a collective that will never end
    if rank == 0 and outcome != "no-result":
        text = measured(folder, trial) if outcome == "measured" else "MLLOG whole\n"
        whole(folder, trial, text)
    if outcome == "stopped" and rank == 0:
        why = "stopped at step 7 (STEPS_THIS_RUN); RESUME=1 continues"
        return fail(folder, trial, 0, why)
    if outcome == "not-reached":
        missed = "the target accuracy 0.72 was not reached"
        return fail(folder, trial, 3, missed) if rank == 0 else 3
    return 0


if __name__ == "__main__":
    ask = {"--check": check, "seeds": seeds}
    sys.exit(next((ask[word] for word in sys.argv if word in ask), train)())
