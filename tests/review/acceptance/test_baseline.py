"""Baselines: figures of a test by name, and comparison of later tests with them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bert.pretraining.config import Config as Trainer
from certify.burn_in import derived
from common.env import from_env
from review.__main__ import main

from .made_up import make, write

STAGES = ("single", "parallel", "node", "pairs", "together")
ALL_REDUCES = ("reduce_node", "reduce_together")
MODEL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.fixture
def described(tmp_path):
    """A function that returns a test's config.json as the load writes it."""

    def describe(**settings: str) -> dict:
        model = tmp_path / "model.json"
        model.write_text(
            json.dumps(
                MODEL
                | {
                    "max_position_embeddings": 512,
                    "num_hidden_layers": int(settings.pop("LAYERS", 1)),
                }
            )
        )
        environ = {
            "SYNTH_DATA": "1",
            "BERT_CONFIG": str(model),
            "LR": "1",
            "MAX_STEPS": "9",
            "DEVICE": "cpu",
        }
        environ |= {
            "SUBMISSION_DIVISION": "open",
            "EVAL_ITER_SAMPLES": "1000",
            "BATCHSIZE": "16",
        } | settings
        trainer = from_env(Trainer, environ)
        trainer.check()
        found = json.loads(json.dumps(dataclasses.asdict(trainer) | derived(trainer), default=str))
        model.unlink()
        return found

    return describe


@pytest.fixture
def saved(tmp_path, monkeypatch, described):
    """A function that writes a test's folder; baseline `first` is saved from a good one."""
    monkeypatch.chdir(tmp_path)

    def test(
        name: str,
        factor: float = 1.0,
        nodes: int = 2,
        seed: int = 1,
        of: dict | None = None,
        **noise,
    ) -> str:
        folder = tmp_path / name
        folder.mkdir()
        slow = {(stage, rank): factor for stage in STAGES for rank in range(2 * nodes)}
        write(folder, make(nodes, 2, seed, slow=slow, **noise))
        (folder / "config.json").write_text(json.dumps(described(**(of or {}))))
        environment = {
            "host": "node0",
            "packages": {"torch": "2.13.0"},
            "git_commit": "c0ffee",
            "cuda": "13.0",
        }
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
    assert found["machine"]["precision"] == "fp32", "what `auto` is on a CPU"
    assert MODEL.items() <= found["machine"]["model"].items(), "though its file is gone"
    assert set(found["metrics"]) == {*STAGES, "together_whole", *ALL_REDUCES}


@pytest.mark.parametrize(
    ("factor", "state", "status"), [(1.0, "pass", 0), (1.04, "warn", 3), (1.1, "fail", 1)]
)
def test_pass_warn_and_fail_are_the_exit_status(saved, capsys, factor, state, status):
    assert main(["baseline", "check", saved("later", factor, seed=2)]) == status
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == state
    assert any("against first of 20" in line for line in said)
    slower = [*STAGES, "together_whole"]
    assert sum(state in line for line in said) == (1 if state == "pass" else 1 + len(slower))


def test_a_change_within_the_noise_passes(saved):
    assert main(["baseline", "check", saved("later", 0.99, seed=5, common=0.09)]) == 0


def test_a_test_of_other_work_is_not_compared(saved, capsys):
    other = saved("other", of={"BATCHSIZE": "8"})
    assert main(["baseline", "check", other]) == 2
    assert "no baseline of the same devices, model and batch" in capsys.readouterr().err
    assert main(["baseline", "check", other, "--name", "first"]) == 2
    assert "baseline first has batch_size 16, this test 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("of", "what"),
    [
        ({"PRECISION": "bf16"}, "precision fp32, this test bf16"),
        ({"LAYERS": "2"}, "model {"),
        ({"OPTIMIZER": "lans"}, "optimizer lamb, this test lans"),
    ],
)
def test_a_test_with_another_model_precision_or_optimizer_is_not_compared(saved, capsys, of, what):
    assert main(["baseline", "check", saved("other", of=of), "--name", "first"]) == 2
    assert f"baseline first has {what}" in capsys.readouterr().err


def test_a_test_without_its_model_is_neither_saved_nor_compared(saved, tmp_path, capsys):
    config = tmp_path / saved("old") / "config.json"
    known = json.loads(config.read_text())
    config.write_text(json.dumps({name: value for name, value in known.items() if name != "model"}))
    for command in (["save", "old", "--name", "second"], ["check", "old"]):
        assert main(["baseline", *command]) == 2
        assert "config.json: lacks model and precision" in capsys.readouterr().err
    assert not (tmp_path / "baselines/second.json").exists()


def test_a_slow_network_is_detected_although_compute_is_unchanged(saved, capsys):
    assert main(["baseline", "check", saved("slow", network=5.0), "--json"]) == 1
    changes = {one["name"]: one for one in json.loads(capsys.readouterr().out)["changes"]}
    assert {name for name, one in changes.items() if one["state"] == "fail"} == {
        "together_whole",
        *ALL_REDUCES,
    }
    assert changes["reduce_together"]["change"] == pytest.approx(4, abs=0.1)
    assert main(["baseline", "check", "slow"]) == 1
    assert "all-reduce of all ranks" in capsys.readouterr().out


def test_a_slow_network_between_pairs_of_nodes_is_detected(saved, capsys):
    assert main(["baseline", "save", saved("four", nodes=4), "--name", "four"]) == 0
    capsys.readouterr()
    slow = saved("slow", nodes=4, links=dict.fromkeys(range(4), 1.5))
    assert main(["baseline", "check", slow, "--name", "four", "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert [one["name"] for one in changes if one["state"] == "fail"] == ["reduce_pairs"]


def test_an_all_reduce_of_two_nodes_counts_once_by_its_fastest_rank():
    records = make(nodes=4)
    found = records.reductions("reduce_pairs")
    assert [len(pairs) for pairs in found.values()] == [1, 2, 1, 2], "pairs that met in each round"
    quickest = sorted(min(times) for times in records.pairs().values())
    assert sorted(one for pairs in found.values() for one in pairs) == quickest


def test_figures_of_a_single_round_are_not_in_a_baseline(saved, tmp_path):
    found = json.loads((tmp_path / "baselines/first.json").read_text())
    assert "reduce_pairs" not in found["metrics"], (
        "two nodes meet once: nothing says how well that repeats"
    )


def test_a_failed_test_is_saved_only_with_force(saved, tmp_path, capsys):
    folder = tmp_path / saved("bad", nodes=4)
    write(folder, make(4, 2, slow={("parallel", 3): 1.5}))
    assert main(["baseline", "save", "bad", "--name", "bad"]) == 2
    said = capsys.readouterr().err
    assert "bad: the test failed (rank 3 on node1: " in said
    assert "--force" in said
    assert not (tmp_path / "baselines/bad.json").exists()
    assert main(["baseline", "save", "bad", "--name", "bad", "--force"]) == 0
    assert (tmp_path / "baselines/bad.json").exists()


def test_a_failed_test_does_not_pass_against_a_baseline(saved, tmp_path, capsys):
    write(tmp_path / saved("bad", nodes=4), make(4, 2, slow={("parallel", 3): 1.5}))
    assert main(["baseline", "check", "bad"]) == 1
    *_, reason, last = capsys.readouterr().out.splitlines()
    assert reason.startswith("  the test itself failed: rank 3 on node1: ")
    assert last == "fail"


def test_with_another_number_of_nodes_only_independent_figures_are_compared(saved, capsys):
    assert main(["baseline", "check", saved("more", nodes=3), "--json"]) == 0
    names = [change["name"] for change in json.loads(capsys.readouterr().out)["changes"]]
    assert names == ["single", "parallel", "node", "reduce_node"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            ["save", "good", "--name", "first"],
            "first.json exists: choose another name, such as first-2",
        ),
        (["save", "good", "--name", "../up"], "--name ../up: letters, digits"),
        (["check", "good", "--name", "none"], "none.json: not a baseline"),
        (["check", "nowhere"], "nowhere: no certify_<node>.npz"),
    ],
)
def test_bad_input_is_one_line(saved, capsys, command, reason):
    assert main(["baseline", *command]) == 2
    assert reason in capsys.readouterr().err
