"""Fine-tuning in several processes of one machine."""

from __future__ import annotations

import os

from ..forked import Command
from ..waiting import free_ports


def start(environment, rank=0, world_size=1, port=0):
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    own = {name: str(value) for name, value in settings.items()}
    return Command("finetune", {**os.environ, **environment, **own})


def finished(*environments):
    """What the ranks with these environments ended with."""
    port, count = free_ports(), len(environments)
    ranks = [start(each, rank, count, port) for rank, each in enumerate(environments)]
    return [rank.finish() for rank in ranks]
