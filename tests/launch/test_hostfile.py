"""HOSTFILE: the machines of run_multinode.sh from a hostfile in DeepSpeed's format."""

from __future__ import annotations

import pytest

from .test_multinode import SSH, last_line, run
from .test_multinode import sshd as sshd


@pytest.fixture
def machines(checkout):
    """The checkout with stand-ins for ssh machines, without HOSTS."""
    checkout.stand_in("ssh", SSH)
    checkout.env |= {"NCCL_TEST": "0"}
    checkout.env.pop("HOSTS", None)
    return checkout


def _hostfile(machines, text):
    path = machines.root.parent / "hostfile"
    path.write_text(text)
    return str(path)


def test_the_first_machines_of_a_hostfile_are_called_in_its_order(machines):
    text = "# rank 0 is on the first\n\n  dgx7 slots=02\r\ndgx3   slots=2 # spare\n\tdgx9 slots=08"
    done = run(machines, HOSTFILE=_hostfile(machines, text))
    assert done.returncode == 0, done.stderr
    assert {rank["MASTER_ADDR"] for rank in machines.ranks()} == {"dgx7"}
    assert sorted(rank["RANK"] for rank in machines.ranks()) == ["0", "1", "2", "3"]
    called = " ".join(machines.calls("ssh"))
    assert "'dgx3'" in called
    assert "dgx9" not in called


def test_hosts_wins(machines):
    done = run(
        machines, HOSTFILE=_hostfile(machines, "dgx7 slots=2\n"), HOSTS="dgx1 dgx2"
    )
    assert done.returncode == 0, done.stderr
    assert {rank["MASTER_ADDR"] for rank in machines.ranks()} == {"dgx1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dgx1 slots=2\ndgx2 slots=two\n", "line 2: 'dgx2 slots=two': expected a machine and its GPUs: node1 slots=8"),
        ("dgx1 slots=2\n-oProxyCommand=x slots=2\n", "line 2: '-oProxyCommand=x slots=2': expected a machine"),
        ("dgx1 slots=2\ndgx1 slots=2\n", "line 2: dgx1 is listed twice"),
        ("dgx1 slots=2\n", "1 machines and the config wants DGXNNODES=2"),
        ("dgx1 slots=2\ndgx2 slots=08\n", "dgx2 slots=8 and DGXNGPU=2: they must be equal"),
        ("dgx1 slots=2\ndgx2 slots=4\n", "dgx2 slots=4 and DGXNGPU=2: they must be equal"),
        ("# none\n", "no machine in it"),
    ],
)  # fmt: skip
def test_an_invalid_hostfile_is_one_line(machines, text, words):
    done = run(machines, HOSTFILE=_hostfile(machines, text))
    assert done.returncode != 0
    assert words in last_line(done.stderr)
    assert last_line(done.stderr).startswith("run: error: HOSTFILE=")
    assert machines.ranks() == []
    assert done.stderr.count("\n") == 1, done.stderr


def test_an_unreadable_hostfile_and_an_invalid_machine_name_are_one_line(machines):
    for wrong, words in (
        (
            {"HOSTFILE": str(machines.root)},
            f"HOSTFILE={machines.root}: not a readable file",
        ),
        (
            {"HOSTS": "dgx1 -oProxyCommand=x"},
            "-oProxyCommand=x is not the name of a machine",
        ),
    ):
        done = run(machines, **wrong)
        assert done.returncode != 0
        assert done.stderr.count("\n") == 1, done.stderr
        assert words in done.stderr
    assert machines.calls("ssh") == []


def test_a_hostfile_over_a_real_ssh_server(sshd):
    text = "127.0.0.1 slots=2\n127.0.0.2 slots=2\n"
    done = run(sshd, HOSTS="", HOSTFILE=_hostfile(sshd, text))
    assert done.returncode == 0, done.stderr
    assert sorted(rank["RANK"] for rank in sshd.ranks()) == ["0", "1", "2", "3"]
