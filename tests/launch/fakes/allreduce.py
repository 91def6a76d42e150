"""Stand-in for the all-reduce test, whose outcome ALLREDUCE sets; after a restart it is a success."""

import os
import signal
import sys
import time
from pathlib import Path

outcome, _, culprit = os.environ.get("ALLREDUCE", "success").partition(":")
folder, rank = Path(os.environ["RUN_DIR"]), os.environ["RANK"]
if folder.name != "nccl_test":
    outcome = "success"
with open(os.environ["FAKE_CALLS"], "a") as file:
    file.write(f"allreduce {rank}\n")
print(outcome, flush=True)
if outcome == "success":
    if rank == "0":
        (folder / "bandwidth.txt").write_text("5 GB/s\n")
    sys.exit()
if outcome == "killed" and rank == culprit:
    os.kill(os.getpid(), signal.SIGKILL)
if outcome == "missing" and rank != culprit:
    (folder / "hang_0.txt").write_text(f"rank {culprit}\n")
    (folder / "error_0.txt").write_text(f"rank {culprit} did not arrive\n")
    sys.exit(4)
if outcome == "fails" and rank == culprit:
    (folder / "error_0.txt").write_text(f"rank {culprit}: wrong sums\n")
    sys.exit(1)
time.sleep(600)
