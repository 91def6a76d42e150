"""Stand-in for torchrun: each rank in a session of its own, and if one fails the others are ended, at once by SIGTERM."""

import itertools
import os
import signal
import sys
from time import monotonic

words = sys.argv[1:]
with open(os.environ["FAKE_CALLS"], "a") as calls:
    calls.write(f"torchrun {' '.join(words)}\n")
options = {"--nnodes": "1", "--node-rank": "0", "--master-addr": "127.0.0.1"}
options |= itertools.pairwise(words)
count = int(options["--nproc-per-node"])
first = int(options["--node-rank"]) * count
environ = os.environ | {"WORLD_SIZE": str(int(options["--nnodes"]) * count)}
environ["MASTER_ADDR"] = options["--master-addr"]
environ["MASTER_PORT"] = options.get("--master-port", "")

# Waited for rather than handled: a handler misses the signal that comes just before a call that waits.
watched = {signal.SIGTERM, signal.SIGCHLD}
signal.pthread_sigmask(signal.SIG_BLOCK, watched)
ranks, reset = set(), [signal.SIGPIPE, signal.SIGINT]
for local in range(count):
    given = environ | {"LOCAL_RANK": str(local), "RANK": str(first + local)}
    ranks.add(os.posix_spawn(words[-1], words[-1:], given, setsid=True, setsigmask=(), setsigdef=reset))  # fmt: skip


def end(number: signal.Signals) -> None:
    for rank in ranks:
        os.kill(rank, number)


status, deadline = 0, float("inf")
while ranks:
    came = signal.sigtimedwait(watched, max(0.0, min(3600.0, deadline - monotonic())))
    if came and came.si_signo == signal.SIGTERM:
        end(signal.SIGTERM)
        sys.exit(1)
    if not came and deadline <= monotonic():
        end(signal.SIGKILL)
    while ranks and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        ranks.discard(ended[0])
        if ended[1]:
            status = 1
            end(signal.SIGTERM)
            deadline = monotonic() + 5  # torchrun itself waits for 30 s
sys.exit(status)
