"""Stand-in for the all-reduce test; ALLREDUCE in the environment sets the outcome."""

import os
import sys
import time
from pathlib import Path

outcome, _, culprit = os.environ.get("ALLREDUCE", "success").partition(":")
with open(os.environ["FAKE_CALLS"], "a") as file:
    file.write(f"allreduce {os.environ['RANK']}\n")
print("all sums right" if outcome == "success" else outcome, flush=True)
if outcome == "hang":
    time.sleep(600)
if outcome == "fails":
    if os.environ["RANK"] == culprit:
        (Path(os.environ["RUN_DIR"]) / "error_0.txt").write_text(
            f"rank {culprit}: wrong sums\n"
        )
        sys.exit(1)
    time.sleep(600)
