"""The all-reduce test before the trials: right sums pass, and faults are named with their rank."""

import os
import re

import pytest
import torch
import torch.distributed as distributed

from bert.__main__ import main
from bert.commands import allreduce
from bert.core.dist import HangError
from common.env import from_env

from ...forked import Command
from ...waiting import free_ports, state, wait_until
from ..plain import CPU, alone

SETTINGS = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SETTINGS |= {"DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
SETTINGS |= {"DIST_TIMEOUT": "200", "NCCL_TEST_MIN_GBPS": "0"}


@pytest.mark.parametrize("world_size", [1, 2, 31, 3472])
def test_the_sum_of_all_patterns_is_the_expected_one(world_size):
    count = 3 * allreduce.PERIOD
    total = torch.zeros(count)
    for rank in range(world_size):
        total += allreduce.pattern(count, rank, CPU)
    assert not len(allreduce.wrong_elements(total, world_size))


def test_every_wrong_element_is_found_and_chunks_in_the_wrong_place():
    total = allreduce.expected(4, CPU).repeat(64)
    assert len(allreduce.wrong_elements(total.roll(1024), 4)) > 1000
    total[[0, 37, 154]] += torch.tensor([1.0, -1.0, 0.5])
    assert allreduce.wrong_elements(total, 4).tolist() == [0, 37, 154]


def test_bandwidth_is_that_of_an_ideal_ring():
    assert allreduce.bus_bandwidth(8_000_000_000, 1.0, 2) == 8.0
    assert allreduce.bus_bandwidth(8_000_000_000, 2.0, 4) == 6.0


@pytest.fixture
def second():
    """Rank 1 of 2, without the other."""
    world = alone()
    world.rank, world.size = 1, 2
    return world


def test_a_network_that_adds_wrong_is_an_error_that_names_the_rank(second):
    def broken(tensor):
        tensor.copy_(allreduce.expected(2, CPU).repeat(len(tensor) // allreduce.PERIOD))
        tensor[70] = 5.5
        return tensor

    second.sum = broken
    right = allreduce.expected(2, CPU)[70 % allreduce.PERIOD]
    said = rf"rank 1 on .*: 1 of 992 sums .* 70 is 5.5 instead of {right:g}"
    with pytest.raises(allreduce.AllReduceError, match=said):
        allreduce.measure(4000, second)


def test_the_roll_call_names_the_ranks_that_did_not_arrive():
    store = distributed.HashStore()
    store.set("here/1", "node")
    said = r"2 of 4 ranks did not arrive in 0 s: rank 2, 3;"
    with pytest.raises(HangError, match=said) as caught:
        allreduce.roll_call(store, 0, 4, 0.2)
    assert caught.value.absent == [2, 3]


@pytest.fixture
def start(tmp_path):
    """start(rank, **variables) -> the running test on that rank of two."""
    settings = SETTINGS | {"MASTER_PORT": str(free_ports()), "PATH": os.environ["PATH"]}
    settings["RUN_DIR"] = str(tmp_path / "run")
    return lambda rank, **env: Command(
        "bert.commands.allreduce", settings | env | {"RANK": str(rank)}
    )


def test_ranks_that_add_right_pass_and_rank_0_prints_the_bandwidth(start, tmp_path):
    ranks = [start(rank) for rank in range(2)]
    ended = [rank.finish() for rank in ranks]
    assert [rank.returncode for rank in ended] == [0, 0], ended
    lines = ended[0].stdout.splitlines()
    assert len(lines) == len(allreduce.CPU_SIZES)
    told = r".*all-reduce of 2 ranks \(gloo\).* GB/s, all sums right"
    assert all(re.match(told, line) for line in lines), lines
    assert ended[1].stdout == ""
    assert (tmp_path / "run" / "bandwidth.txt").read_text() == ended[0].stdout


def test_bandwidth_below_the_sites_demand_fails(second, monkeypatch):
    monkeypatch.setattr(allreduce, "connect", lambda config: second)
    # 1 GB/s.
    monkeypatch.setattr(allreduce, "measure", lambda num_bytes, world: num_bytes / 1e9)
    settings = SETTINGS | {"RANK": "1", "NCCL_TEST_MIN_GBPS": "1.6"}
    config = from_env(allreduce.AllReduceConfig, settings)
    said = r"is 1.00 GB/s, below NCCL_TEST_MIN_GBPS=1.6$"
    with pytest.raises(allreduce.AllReduceError, match=said):
        allreduce.run(config)


def test_under_torchrun_the_ranks_meet_at_the_store_that_it_has_opened():
    opened = {"is_master": True, "wait_for_workers": False}
    store = distributed.TCPStore("127.0.0.1", port := free_ports(), **opened)
    environ = SETTINGS | {"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": str(port)}
    agent = environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    allreduce.run(from_env(allreduce.AllReduceConfig, agent))
    assert store.check(["allreduce/here/0"])
    reason = f"rank 0 on .* does not reach rank 0 at 127.0.0.1:{port}: "
    # It cannot listen there a second time.
    with pytest.raises(allreduce.AllReduceError, match=reason):
        allreduce.run(from_env(allreduce.AllReduceConfig, environ))


def test_a_rank_that_stops_makes_the_others_fail_by_the_timeout(start, tmp_path):
    (tmp_path / "run").mkdir()
    second = start(1, DIST_TIMEOUT="1", STANDS_AT=str(tmp_path))
    wait_until(lambda: state(second.pid) == "T")
    try:
        first = start(0, DIST_TIMEOUT="1").finish()
    finally:
        second.kill()
    assert first.returncode == 4
    assert (tmp_path / "run" / "hang_0.txt").read_text().endswith("\nrank 1\n")
    assert "error: 1 of 2 ranks did not arrive in 1 s: rank 1;" in first.stderr
    assert "did not arrive" in (tmp_path / "run" / "error_0.txt").read_text()


def test_an_address_where_nobody_listens_is_named(tmp_path, capsys):
    environ = SETTINGS | {"RANK": "1", "MASTER_PORT": str(port := free_ports())}
    environ |= {"DIST_TIMEOUT": "1", "RUN_DIR": str(tmp_path)}
    assert main(["allreduce"], environ) == 1
    reason = f"does not reach rank 0 at 127.0.0.1:{port}: "
    assert reason in capsys.readouterr().err
    assert reason in (tmp_path / "error_0.txt").read_text()


def test_a_wrong_value_is_one_line_with_status_2(capsys):
    assert main(["allreduce"], SETTINGS | {"NCCL_TEST_MIN_GBPS": "fast"}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bert allreduce: error: NCCL_TEST_MIN_GBPS='fast': ")
