"""Expected figures of a config: reached, missed or not measured, and the exit status."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest

from common.env import from_env
from review.__main__ import main
from review.acceptance.schema import Expected

from .made_up import (
    REDUCE_SECONDS,
    ROUNDS,
    SEQUENCES,
    STEP_SECONDS,
    WAIT_SECONDS,
    make,
    write,
)

RATE = SEQUENCES / (STEP_SECONDS + WAIT_SECONDS)  # sequences/s of a healthy rank


@pytest.fixture
def judged(tmp_path, capsys):
    """Writes records and expected figures; returns exit status and output."""

    def judge(records, *options: str, **expected: float) -> tuple[int, str]:
        write(tmp_path, records)
        (tmp_path / "config.json").write_text(json.dumps({"expected": expected}))
        status = main(["certify", str(tmp_path), *options])
        return status, capsys.readouterr().out

    return judge


def slower(factor: float, *ranks: int) -> dict[tuple[str, int], float]:
    return {("parallel", rank): factor for rank in ranks}


@pytest.mark.parametrize(("share", "status"), [(0.97, 0), (1.045, 3), (1.15, 1)])
def test_pass_warn_and_fail_are_the_exit_status(judged, share, status):
    found, said = judged(make(1, 2, between=0), parallel=share * RATE)
    assert found == status
    assert said.splitlines()[-1] == {0: "pass", 3: "warn", 1: "fail"}[status]
    assert "sequences/s expected" in said
    assert ("% below" in said) == bool(status)


def test_of_two_ranks_the_one_below_expectation_is_named(judged):
    status, said = judged(
        make(1, 2, between=0, slow=slower(1.15, 1)), parallel=0.99 * RATE
    )
    assert status == 1
    assert "rank 1 on node0: " in said
    assert "rank 0 on node0: " not in said


def test_if_most_ranks_fall_short_there_is_one_line(judged):
    status, said = judged(
        make(2, 2, between=0, slow=slower(1.2, 0, 1, 2)), parallel=RATE
    )
    assert status == 1
    assert said.count("% below") == 1
    assert "all ranks: " in said


def test_a_shortfall_within_the_noise_passes(judged):
    records = make(1, 2, between=0)
    records.steps["compute"][records.steps["round"] >= ROUNDS // 2] *= 1.3
    status, said = judged(records, parallel=RATE)
    assert status == 0
    assert "all ranks: 2" in said


def test_the_speed_of_the_last_stage_is_that_of_all_ranks(judged):
    status, said = judged(make(2, 2, between=0), together=4 * RATE * 1.2)
    assert status == 1
    assert "all ranks: " in said
    assert "all ranks, gradients reduced" in said


def with_probe(name: str, seconds: float, amount: float):
    """Records with a probe, six rounds on each of two ranks."""
    records = make(1, 2, between=0)
    count = 12
    columns = {
        "rank": np.tile([0, 1], 6),
        "probe": np.full(count, name.encode()),
        "round": np.repeat(np.arange(6), 2),
    }
    columns |= {
        "partner": np.full(count, -1),
        "seconds": np.full(count, seconds),
        "amount": np.full(count, amount),
    }
    records.probes.update(columns)
    return records


@pytest.mark.parametrize(
    ("name", "seconds", "amount", "reached", "unit"),
    [
        ("matmul", 0.5, 3e14, 600, "Tflop/s"),
        ("copy", 0.25, 1e9, 4, "GB/s"),
        (
            "reduce_together",
            REDUCE_SECONDS,
            1e9,
            50,
            "GB/s",
        ),  # two ranks: 2 (2 - 1) / 2 of the bytes
    ],
)
def test_operations_and_bytes_are_in_the_units_of_the_variables(
    judged, name, seconds, amount, reached, unit
):
    status, said = judged(with_probe(name, seconds, amount), **{name: float(reached)})
    assert status == 0
    assert f"{reached} of {reached} {unit} expected" in said
    assert judged(with_probe(name, seconds, amount), **{name: 1.1 * reached})[0] == 1


def test_every_number_is_printed_with_its_unit_and_its_limit(judged):
    status, said = judged(make(4, 2, between=0), parallel=0.99 * RATE)
    assert status == 0
    found = {
        line[2:42].strip() + " " + line[68:80].strip(): line[81:].strip()
        for line in said.splitlines()[1:11]
    }
    step = "at most 3% slower than the median, or by chance"
    assert found == {
        "one rank at a time ms a step": step,
        "all ranks, each by itself ms a step": step,
        "the ranks of a node, gradients reduced ms a step": step,
        "two nodes, gradients reduced ms a step": "no limit",
        "all ranks, gradients reduced ms a step": step,
        "all ranks, each by itself sequences/s": f"at least {0.95 * 0.99 * RATE:,.4g} ({0.99 * RATE:,.4g} expected)",
        "all ranks, gradients reduced sequences/s": "no limit",
        "all-reduce of all ranks GB/s": "no limit",
        "all-reduce of each node GB/s": "no limit",
        "all-reduce of two nodes GB/s": "at most 15% slower than the median, or by chance",
    }


def test_with_too_few_ranks_only_the_configs_limit_applies(judged):
    records = with_probe("matmul", 0.5, 3e14)
    assert judged(records)[1].count("no limit") == len(
        [*records.stages, "parallel", "together", "matmul"]
    )
    (line,) = [
        one
        for one in judged(records, matmul=600)[1].splitlines()
        if "(600 expected)" in one
    ]
    assert line.split() == [
        *[
            "matrix",
            "product",
            "600",
            "Tflop/s",
            "at",
            "least",
            "570",
            "(600",
            "expected)",
        ]
    ]


def test_json_has_the_parts_of_the_load(judged):
    _, said = judged(with_probe("matmul", 0.5, 3e14), "--json", matmul=650.0)
    (found,) = [one for one in json.loads(said)["figures"] if one["name"] == "matmul"]
    assert found["values"] == {
        "rank 0 on node0": pytest.approx(600),
        "rank 1 on node0": pytest.approx(600),
    }
    assert (found["unit"], found["limits"]) == (
        "Tflop/s",
        ["at least 617.5 (650 expected)"],
    )


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_figures_of_a_good_machine_are_expected_by_a_file_to_source(
    judged, tmp_path, factor
):
    records = make(1, 4, between=0, step=0, slow=slower(factor, 1))
    status, said = judged(records, "--expect", str(tmp_path / "good.json"))
    if factor > 1:
        assert (status, said) == (2, "")
        assert not (tmp_path / "good.sh").exists()
        return
    assert status == 0
    command = ["bash", "-c", f"source {tmp_path}/good.sh; echo $EXPECTED_FIGURES"]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = from_env(Expected, {"EXPECTED_FIGURES": written}).figures()
    assert [*found] == ["parallel", "together", "reduce_together"]
    assert found["parallel"] == pytest.approx(RATE, rel=1e-3)
    assert found["together"] == pytest.approx(4 * RATE, rel=1e-3)


def test_the_fastest_all_reduce_counts(judged):
    records = with_probe("reduce_together", REDUCE_SECONDS, 1e9)
    records.probes["seconds"][1::2] *= 10
    assert "50 of 50 GB/s expected" in judged(records, reduce_together=50.0)[1]


def test_expected_figures_that_were_not_measured_are_not_tested_in_the_line_too(judged):
    status, said = judged(make(1, 2), disk=3.0)
    assert status == 0
    assert "disk=3 (expected, not measured)" in said
    assert (
        "disk=3 (expected, not measured)" in judged(make(1, 2), "--line", disk=3.0)[1]
    )


def test_an_all_reduce_of_two_nodes_counts_once_by_its_fastest_rank():
    records = make(nodes=4)
    # Each pair met in one round.
    quickest = sorted(min(times) for times in records.pairs().values())
    assert sorted(records.reductions("reduce_pairs")) == quickest
    assert len(quickest) == 6
