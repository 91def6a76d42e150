"""The process group of a run: when it is destroyed, and what is kept of it."""

import json
import os
import platform
import signal
from unittest import mock

import pytest
import torch

from bert.core import dist, rundir
from bert.core.dist import DistConfig, HangError, World
from common.process import hard_exit

from ...forked import context
from ...waiting import free_ports
from ..ranks import run_ranks


def _look(world, before):
    """What was left before this world."""
    world.barrier()  # rank 0 has the store, by which the others still find it
    before.append(world.size)
    # A group of which nothing is kept.
    assert [group.size() for group in dist._left] == before[:-1]


def _stopped(rank, odd, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = DistConfig(rank=rank, world_size=3, device="cpu", timeout_seconds=8)
    dist.PATIENCE = 4.0
    try:
        with World(config) as world:
            world.barrier()
            if rank == odd:
                os.kill(os.getpid(), signal.SIGSTOP)
            world.barrier()
    except HangError as error:
        rundir.failed(rundir.RunConfig(run_dir=folder), "bert", error)
        (folder / str(rank)).write_text(str(error))
    hard_exit(1)


STORE = pytest.param(0, marks=pytest.mark.slow, id="the one with the store")


@pytest.mark.parametrize("odd", [1, STORE])
def test_after_a_hang_the_others_name_missing_ranks_nodes_and_timeout(odd, tmp_path):
    port = free_ports()
    given = [(rank, odd, port, tmp_path) for rank in range(3)]
    started = [context().Process(target=_stopped, args=args) for args in given]
    for process in started:
        process.start()
    others = [rank for rank in range(3) if rank != odd]
    for rank in others:
        started[rank].join(200)
    started[odd].kill()
    store = "" if odd else ", where the store of the ranks is,"
    where = f"rank {odd} on {platform.node()}{store}"
    what = "gloo:barrier, collective 2 at the latest, DIST_TIMEOUT=8 s ("
    told = {(tmp_path / str(rank)).read_text() for rank in others}
    assert all(said.startswith(f"{where} did not reach {what}") for said in told)
    assert not (tmp_path / str(odd)).exists()
    first, *ranks_named = (tmp_path / "hang_0.txt").read_text().splitlines()
    assert first in told
    assert ranks_named == [f"rank {odd}"]


STARTED = {"state": "started", "collective_seq_id": 7, "profiling_name": "nccl:all_reduce"}  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "collective"),
    [({}, "a collective"), ({"entries": [STARTED]}, "nccl:all_reduce, collective 7")],
    ids=["empty", "filled"],
)
def test_after_a_hang_on_gpus_nccls_recorder_is_read(entries, collective, monkeypatch):
    monkeypatch.setattr(dist, "PATIENCE", 0.2)
    dumped = json.dumps({"version": "2.10"} | entries).encode()
    library, name = torch._C._distributed_c10d, "_dump_nccl_trace_json"
    monkeypatch.setattr(library, name, lambda: dumped, raising=False)
    world = World(DistConfig(device="cpu"))
    world.joined, world.size, world.device = True, 2, torch.device("cuda")
    world.store, world.first_node = torch.distributed.HashStore(), "n0"
    for rank in range(2):
        world.store.set(f"node/{rank}", f"n{rank}")
    with pytest.raises(HangError) as raised, world:
        raise HangError("rank 0: the GPU did not finish a step")
    assert raised.value.absent == [1]
    assert str(raised.value).startswith(f"rank 1 on n1 did not reach {collective}, ")


OLD, NEW, REGISTER = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER"  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "registers"),
    [
        ({}, None),
        ({OLD: "expandable_segments:False"}, None),
        ({OLD: "max_split_size_mb:1, expandable_segments:True"}, "0"),
        ({NEW: "expandable_segments: True"}, "0"),
        ({NEW: "expandable_segments:True", REGISTER: "1"}, "1"),
    ],
)
def test_nccl_does_not_register_buffers_in_segments_that_expand(settings, registers):
    with mock.patch.dict(os.environ, settings):
        for name in {OLD, NEW, REGISTER} - settings.keys():
            os.environ.pop(name, None)
        dist.spare_expandable_segments()
        assert os.environ.get(REGISTER) == registers


def test_a_destroyed_group_is_kept_alive():
    run_ranks(_look, 2, 2, arguments=([],))
