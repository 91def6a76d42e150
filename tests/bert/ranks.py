"""Several real processes, joined by gloo, for tests of ranks."""

import os
import time
import traceback

import torch

from bert.core.dist import DistConfig, World

from ..forked import context
from ..waiting import free_ports

TIMEOUT_SECONDS = 900  # below that of a test, so that the ranks' own errors are shown


def _worker(function, rank, sizes, arguments, queue):
    torch.set_num_threads(1)
    # Not by this machine's name, whose address is others' to change.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        for size, port in sizes:
            if rank < size:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                config = DistConfig(rank=rank, world_size=size, device="cpu")
                with World(config) as world:
                    function(world, *arguments)
    except BaseException:
        queue.put(traceback.format_exc())
        raise


def run_ranks(function, *sizes, arguments=()):
    """Calls function(world, *arguments) on every rank of worlds of the given sizes, one world after
    the other.

    The function must be importable. Fails with the traceback of a rank that failed.
    """
    processes = context()
    queue = processes.SimpleQueue()
    worlds = [(size, free_ports()) for size in sizes]
    given = [(function, rank, worlds, arguments, queue) for rank in range(max(sizes))]
    workers = [processes.Process(target=_worker, args=args) for args in given]
    try:
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while any(worker.exitcode is None for worker in workers):
            late = time.monotonic() > deadline
            if late or any(worker.exitcode for worker in workers):
                break  # the others may wait for it in vain
            time.sleep(0.05)
        codes = [worker.exitcode for worker in workers]
    finally:  # also where the test's own limit ends it
        for worker in workers:
            if worker.pid is not None:
                worker.kill()
    assert codes == [0] * len(workers), queue.get() if not queue.empty() else codes
