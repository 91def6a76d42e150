"""The verdict of an acceptance test: the slow one is named and nobody else; clean machines pass."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from review.__main__ import main
from review.certify.verdict import certify


def write(folder: Path, ranks: int, seed: int, per_node: int = 8, **slow: tuple[int, float]) -> None:
    """Records of ranks with noise as real ones: 0.5% between steps, 0.3% between GPUs. slow: stage=(rank, factor)."""
    generator = np.random.default_rng(seed)
    speed = 1 + 0.003 * generator.standard_normal(ranks)
    for rank in range(ranks):
        seconds = {}
        for stage in ("single", "parallel", "together"):
            times = 0.1 * speed[rank] * (1 + 0.005 * np.abs(generator.standard_normal(50)))
            if slow.get(stage, (-1, 1.0))[0] == rank:
                times = times * slow[stage][1]
            seconds[stage] = times.tolist()
        record = {"rank": rank, "node": f"node{rank // per_node}", "seconds": seconds, "weights_crc32": 7}
        (folder / f"certify_rank{rank}.json").write_text(json.dumps(record))


def change(folder: Path, rank: int, changes) -> None:
    path = folder / f"certify_rank{rank}.json"
    record = json.loads(path.read_text())
    changes(record)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_of_clean_machines_nobody_is_named(tmp_path, ranks):
    for seed in range(20):
        write(tmp_path, ranks, seed)
        assert certify(tmp_path).reasons() == []


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("stage", ["single", "parallel"])
def test_a_slow_rank_is_named_with_its_stage_and_nobody_else(tmp_path, ranks, stage):
    write(tmp_path, ranks, 0, **{stage: (5, 1.1)})
    (found,) = [one for one in certify(tmp_path).stages if not one.passes]
    assert found.name == stage
    assert [one.name for one in found.slow_ranks] == ["rank 5 on node0"]
    assert found.slow_ranks[0].excess == pytest.approx(0.1, abs=0.02)


def test_a_slow_node_is_named_once_and_not_each_of_its_ranks(tmp_path):
    write(tmp_path, 48, 0)
    for rank in range(16, 24):
        change(tmp_path, rank, lambda record: record["seconds"].update(single=[0.12] * 50))
    (reason,) = certify(tmp_path).reasons()
    assert reason.startswith("node node2: ")


def test_a_rank_that_stops_now_and_then_is_named_though_its_median_is_as_the_others(tmp_path):
    write(tmp_path, 8, 0)
    change(tmp_path, 3, lambda record: record["seconds"]["parallel"].__setitem__(slice(0, 50, 10), [0.3] * 5))
    (reason,) = certify(tmp_path).reasons()
    assert reason.startswith("rank 3 on node0: ")
    assert "more lost in single steps" in reason


def test_two_ranks_are_too_few_to_say_which_is_slow(tmp_path):
    write(tmp_path, 2, 0, single=(1, 2.0))
    found = certify(tmp_path)
    assert found.passes
    assert not found.as_dict()["compared"]


def test_a_rank_that_computed_something_else_fails_the_test(tmp_path, capsys):
    write(tmp_path, 8, 0)
    change(tmp_path, 6, lambda record: record.update(weights_crc32=8))
    assert main(["certify", str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "  rank 6 on node0: its weights differ from those of the other ranks after the same steps" in said
    assert said[-1] == "fail"


@pytest.mark.parametrize("text", ["", "{}", '{"rank": 0, "node": "a", "weights_crc32": 1, "seconds": {"single": []}}'])
def test_a_record_cut_short_is_one_line(tmp_path, capsys, text):
    write(tmp_path, 4, 0)
    (tmp_path / "certify_rank2.json").write_text(text)
    assert main(["certify", str(tmp_path)]) == 2
    assert "certify_rank2.json: no record of a test that ran to its end" in capsys.readouterr().err


def test_a_folder_without_records_is_one_line(tmp_path, capsys):
    assert main(["certify", str(tmp_path)]) == 2
    assert "no certify_rank*.json" in capsys.readouterr().err
