"""Baselines: a test's figures by name, later ones held to them, and how they drift."""

from __future__ import annotations

import json

import pytest

from review.__main__ import main

from .made_up import make, write

CONFIG = {"bert_config": "model.json", "data": {"batch_size": 16, "max_seq_length": 512}, "numerics": {}}
STAGES = ("single", "parallel", "node", "pairs", "together")


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A function that writes the folder of a test; baseline `first` is saved of a good one."""
    monkeypatch.chdir(tmp_path)

    def test(name: str, factor: float = 1.0, nodes: int = 2, seed: int = 1, batch: int = 16, **noise: float) -> str:
        folder = tmp_path / name
        folder.mkdir()
        slow = {(stage, rank): factor for stage in STAGES for rank in range(2 * nodes)}
        write(folder, make(nodes, 2, seed, slow=slow, **noise))
        config = CONFIG | {"data": {"batch_size": batch, "max_seq_length": 512}}
        (folder / "config.json").write_text(json.dumps(config))
        environment = {"host": "node0", "packages": {"torch": "2.13.0"}, "git_commit": "c0ffee", "cuda": "13.0"}
        (folder / "environment.json").write_text(json.dumps(environment))
        return name

    assert main(["baseline", "save", test("good"), "--name", "first"]) == 0
    return test


def test_a_baseline_says_machine_versions_and_commit(saved, tmp_path):
    found = json.loads((tmp_path / "baselines/first.json").read_text())
    assert found["commit"] == "c0ffee"
    assert found["versions"]["torch"] == "2.13.0"
    assert found["machine"]["devices"] == ["CPU"]
    assert found["machine"]["nodes"] == 2
    assert set(found["metrics"]) == set(STAGES)


@pytest.mark.parametrize(("factor", "state", "status"), [(1.0, "pass", 0), (1.04, "warn", 3), (1.1, "fail", 1)])
def test_pass_warn_and_fail_are_the_exit_status(saved, capsys, factor, state, status):
    assert main(["baseline", "check", saved("later", factor, seed=2)]) == status
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == state
    assert any("against first of 20" in line for line in said)
    assert sum(state in line for line in said) == (1 if state == "pass" else 1 + len(STAGES))


def test_what_is_within_the_noise_of_the_tests_is_no_failure(saved):
    assert main(["baseline", "check", saved("later", 0.99, seed=5, common=0.09)]) == 0


def test_a_test_of_other_work_is_not_compared(saved, capsys):
    other = saved("other", batch=8)
    assert main(["baseline", "check", other]) == 2
    assert "no baseline of the same devices, model and batch" in capsys.readouterr().err
    assert main(["baseline", "check", other, "--name", "first"]) == 2
    assert "baseline first is of batch_size 16, and this test of 8" in capsys.readouterr().err


def test_with_another_number_of_nodes_what_does_not_depend_on_it_is_compared(saved, capsys):
    assert main(["baseline", "check", saved("more", nodes=3), "--json"]) == 0
    names = [change["name"] for change in json.loads(capsys.readouterr().out)["changes"]]
    assert names == ["single", "parallel", "node"]


def test_drift_is_a_page_with_a_chart_over_all_baselines(saved, tmp_path, capsys):
    assert main(["baseline", "save", saved("later", 1.2), "--name", "second"]) == 0
    assert main(["baseline", "drift"]) == 0
    page = (tmp_path / "drift.html").read_text()
    assert "the largest change is" in page
    assert page.count("<polyline") >= 3 * len(STAGES)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["save", "good", "--name", "first"], "first.json exists: choose another name, such as first-2"),
        (["save", "good", "--name", "../up"], "--name ../up: letters, digits"),
        (["check", "good", "--name", "none"], "none.json: no baseline"),
        (["check", "nowhere"], "nowhere: no certify_<node>.npz"),
        (["drift", "--folder", "empty"], "empty: no baselines"),
    ],
)
def test_bad_input_is_one_line(saved, capsys, command, reason):
    assert main(["baseline", *command]) == 2
    assert reason in capsys.readouterr().err
