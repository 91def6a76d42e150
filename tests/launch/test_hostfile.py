"""HOSTFILE: the machines of run_multinode.sh from a hostfile in DeepSpeed's format."""

from __future__ import annotations

import runpy

import pytest

from . import platforms
from .test_multinode import sshd as sshd


@pytest.fixture
def machines(checkout):
    """The checkout with stand-ins for ssh machines, without HOSTS."""
    del platforms.ssh(checkout).env["HOSTS"]
    return checkout


def _hostfile(machines, text):
    path = machines.root.parent / "hostfile"
    path.write_text(text)
    return str(path)


def test_the_first_machines_of_a_hostfile_are_called_in_its_order(machines):
    text = "# rank 0 is on the first\n\n  dgx7 slots=02\r\ndgx3   slots=2 # spare\n\tdgx9 slots=08"
    machines.run(HOSTFILE=_hostfile(machines, text), status=0)
    assert {rank["MASTER_ADDR"] for rank in machines.ranks()} == {"dgx7"}
    assert sorted(rank["RANK"] for rank in machines.ranks()) == ["0", "1", "2", "3"]
    called = " ".join(machines.calls("ssh"))
    assert "'dgx3'" in called
    assert "dgx9" not in called


def test_hosts_wins(machines):
    given = {"HOSTFILE": _hostfile(machines, "dgx7 slots=2\n"), "HOSTS": "dgx1 dgx2"}
    machines.run(status=0, **given)
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
def test_an_invalid_hostfile_says_what_is_wrong(repository, tmp_path, text, words):
    (tmp_path / "hostfile").write_text(text)
    program = runpy.run_path(str(repository / "launch" / "ssh" / "hosts.py"))
    with pytest.raises(ValueError, match=words.replace("(", "[(]")):
        program["main"](str(tmp_path / "hostfile"), "2", "2")


@pytest.mark.parametrize(
    ("text", "words"), [("# none\n", ": no machine in it"), (None, ": not a readable file")]
)  # fmt: skip
def test_a_wrong_hostfile_is_one_line_before_a_machine_is_called(machines, text, words):
    file = _hostfile(machines, text) if text else str(machines.root)
    done = machines.refused(f"HOSTFILE={file}{words}", HOSTFILE=file)
    assert done.stderr.count("\n") == 1, done.stderr
    assert machines.calls("ssh") == []


def test_a_hostfile_over_a_real_ssh_server(sshd):
    text = "127.0.0.1 slots=2\n127.0.0.2 slots=2\n"
    sshd.run(HOSTS="", HOSTFILE=_hostfile(sshd, text), status=0)
    assert sorted(rank["RANK"] for rank in sshd.ranks()) == ["0", "1", "2", "3"]
