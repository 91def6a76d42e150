"""Expected figures of a config: reached, missed or not measured, and the exit status; the time to
train and its place among published results, or why there is nothing to compare.
"""

import json
import subprocess

import pytest

from common.env import from_env
from review.acceptance.records import read
from review.acceptance.schema import Expected
from review.acceptance.verdict import standing
from review.rulebook.rcp import find
from review.rulebook.rules import table

from .made_up import (
    REDUCE_SECONDS,
    ROUNDS,
    SEQUENCES,
    STEP_SECONDS,
    WAIT_SECONDS,
    add_rates,
    make,
    write,
)

RATE = SEQUENCES / (STEP_SECONDS + WAIT_SECONDS)  # sequences/s of a healthy rank


def slower(factor: float, *ranks: int) -> dict[tuple[str, int], float]:
    return {("parallel", rank): factor for rank in ranks}


@pytest.mark.parametrize(
    ("machine", "figure", "expected", "status", "names"),
    [
        ({"nodes": 1}, "parallel", 0.97, 0, []),
        ({"nodes": 1}, "parallel", 1.045, 3, ["all ranks"]),
        ({"nodes": 1}, "parallel", 1.15, 1, ["all ranks"]),
        ({"nodes": 1, "slow": slower(1.15, 1)}, "parallel", 0.99, 1, ["rank 1 on node0"]),
        # If most fall short there is one line.
        ({"nodes": 2, "slow": slower(1.2, 0, 1, 2)}, "parallel", 1.0, 1, ["all ranks"]),
        # Of the last stage, the sum of all.
        ({"nodes": 2}, "together", 4 * 1.2, 1, ["all ranks"]),
    ],
)  # fmt: skip
def test_who_misses_the_expected_figure_and_by_how_much_is_the_exit_status(
    certified, machine, figure, expected, status, names
):
    records = make(between=0, **machine)
    found, said = certified(records, expected={figure: expected * RATE})
    lines = said.splitlines()
    assert (found, lines[-1]) == (status, {0: "pass", 3: "warn", 1: "fail"}[status])
    assert "sequences/s expected" in said
    missed = [line.strip().partition(":")[0] for line in lines if "% below" in line]
    assert missed == names


def test_a_shortfall_within_the_noise_passes(certified):
    records = make(1, 2, between=0)
    records.steps["compute"][records.steps["round"] >= ROUNDS // 2] *= 1.3
    status, said = certified(records, expected={"parallel": RATE})
    assert (status, "all ranks: 2" in said) == (0, True)


def with_probe(name: str, seconds: float, amount: float):
    """Records with this probe alone, six rounds on each of two ranks."""
    records, rate = make(1, 2, between=0), amount / seconds / 1e9
    records.probes.update({one: own[:0] for one, own in records.probes.items()})
    return add_rates(records, {(rank, name, -1): rate for rank in (0, 1)}, 6, amount)


@pytest.mark.parametrize(
    ("name", "seconds", "amount", "reached", "unit"),
    [
        ("matmul", 0.5, 3e14, 600, "Tflop/s"),
        ("copy", 0.25, 1e9, 4, "GB/s"),
        # Two ranks: 2 (2 - 1) / 2 of the bytes.
        ("reduce_together", REDUCE_SECONDS, 1e9, 50, "GB/s"),
    ],
)
def test_operations_and_bytes_are_in_the_units_of_the_variables(
    certified, name, seconds, amount, reached, unit
):
    records = with_probe(name, seconds, amount)
    status, said = certified(records, expected={name: float(reached)})
    assert status == 0
    assert f"{reached} of {reached} {unit} expected" in said
    assert certified(records, expected={name: 1.1 * reached})[0] == 1


def test_every_number_is_printed_with_its_unit_and_its_limit(certified):
    reached = {"parallel": 0.99 * RATE}
    status, said = certified(make(4, 2, between=0), expected=reached)
    step = "at most 3% slower than the median, or by chance"
    reduced = "at most 15% slower than the median, or by chance"
    expected = f"at least {0.95 * 0.99 * RATE:,.4g} ({0.99 * RATE:,.4g} expected)"
    lines = said.splitlines()[1:11]
    found = [(line[2:42].strip(), line[68:80].strip(), line[81:]) for line in lines]
    assert status == 0
    assert {f"{label} {unit}": limit.strip() for label, unit, limit in found} == {
        "one rank at a time ms a step": step,
        "all ranks, each by itself ms a step": step,
        "the ranks of a node, gradients reduced ms a step": step,
        "two nodes, gradients reduced ms a step": "no limit",
        "all ranks, gradients reduced ms a step": step,
        "all ranks, each by itself sequences/s": expected,
        "all ranks, gradients reduced sequences/s": "no limit",
        "all-reduce of all ranks GB/s": "no limit",
        "all-reduce of each node GB/s": "no limit",
        "all-reduce of two nodes GB/s": reduced,
    }


def test_with_too_few_ranks_only_the_configs_limit_applies(certified):
    records = with_probe("matmul", 0.5, 3e14)
    _, said = certified(records)
    assert "or by chance" not in said
    assert said.count("no limit") > len(records.stages)
    _, said = certified(records, expected={"matmul": 600})
    (line,) = [one for one in said.splitlines() if "(600 expected)" in one]
    assert line.split()[:4] == ["matrix", "product", "600", "Tflop/s"]
    assert line.endswith("at least 570 (600 expected)")


def test_json_has_the_parts_of_the_load(certified):
    records = with_probe("matmul", 0.5, 3e14)
    _, said = certified(records, "--json", expected={"matmul": 650.0})
    (found,) = [one for one in json.loads(said)["figures"] if one["name"] == "matmul"]
    both = dict.fromkeys(("rank 0 on node0", "rank 1 on node0"), pytest.approx(600))
    assert (found["values"], found["unit"]) == (both, "Tflop/s")
    assert found["limits"] == ["at least 617.5 (650 expected)"]


def test_figures_of_a_good_machine_are_expected_by_a_file(certified, tmp_path):
    sourced, option = tmp_path / "good.sh", ("--expect", str(tmp_path / "good.json"))
    slow = make(1, 4, between=0, step=0, slow=slower(1.5, 1))
    assert certified(slow, *option)[0] == 2
    assert not sourced.exists()
    assert certified(make(1, 4, between=0, step=0), *option)[0] == 0
    command = ["bash", "-c", f"source {sourced}; echo $EXPECTED_FIGURES"]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = from_env(Expected, {"EXPECTED_FIGURES": written}).figures()
    assert [*found] == ["parallel", "together", "reduce_together"]
    assert found["parallel"] == pytest.approx(RATE, rel=1e-3)
    assert found["together"] == pytest.approx(4 * RATE, rel=1e-3)


def test_the_fastest_all_reduce_counts(certified):
    records = with_probe("reduce_together", REDUCE_SECONDS, 1e9)
    records.probes["seconds"][records.probes["rank"] == 1] *= 10
    _, said = certified(records, expected={"reduce_together": 50.0})
    assert "50 of 50 GB/s expected" in said


@pytest.mark.parametrize("option", [[], ["--line"]])
def test_expected_figures_that_were_not_measured_are_not_tested(certified, option):
    status, said = certified(make(1, 2), *option, expected={"disk": 3.0})
    assert (status, "disk=3 (expected, not measured)" in said) == (0, True)


def test_an_all_reduce_of_two_nodes_counts_once_by_its_fastest_rank():
    records = make(nodes=4)
    # Each pair met in one round.
    quickest = sorted(min(times) for times in records.pairs().values())
    assert sorted(records.reductions("reduce_pairs")) == quickest
    assert len(quickest) == 6


BERT_LARGE = table("benchmark_settings")["model"]
STEP = STEP_SECONDS + WAIT_SECONDS
DATA = {"batch_size": 48, "gradient_steps": 1, "packing_factor": 2, "max_seq_length": 512}  # fmt: skip
CONFIG = {"model": BERT_LARGE, "data": DATA}


def test_the_time_to_train_is_at_the_end_of_text_json_and_page(certified, tmp_path):
    status, said = certified(make(1, 8), **CONFIG)
    *_, where, last = said.splitlines()
    assert (status, last) == (0, "pass")
    assert where.startswith("  where this stands: about ")
    assert "at batch 768 as the reference converges, " in where
    page = tmp_path / "page.html"
    found = json.loads(certified(None, "--json", "-o", str(page))[1])["standing"]
    steps = found["minutes"] * 60 / STEP / (1 + 10_000 / 150_000)
    assert steps * 768 == pytest.approx(find(768)[0].mean, rel=0.03)
    assert (found["batch_size"], found["accelerators"]) == (768, 8)
    assert found["text"] in where
    assert f"<p>A{found['text'][1:]}.</p>" in page.read_text()


def test_a_slower_step_or_a_longer_wait_lengthens_the_time_to_train(tmp_path):
    slow = {("together", rank): 1.5 for rank in range(8)}
    quick, waiting, computing = (
        standing(read(write(tmp_path, make(1, 8, **changes), **CONFIG))).minutes
        for changes in ({}, {"network": 3.0}, {"slow": slow})
    )
    longer = STEP_SECONDS + 3 * WAIT_SECONDS, 1.5 * STEP_SECONDS + WAIT_SECONDS
    found = waiting / quick, computing / quick
    assert found == pytest.approx([seconds / STEP for seconds in longer], rel=0.02)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (CONFIG, {"starved": {}}, "this test was of CPUs"),
        (CONFIG | {"model": BERT_LARGE | {"num_hidden_layers": 4}}, {}, "this was another model"),
        (CONFIG | {"data": DATA | {"max_seq_length": 128}}, {}, "this was another model"),
        ({}, {}, "this was another model"),
    ],
    ids=["CPUs", "small model", "short rows", "no settings"],
)  # fmt: skip
def test_cpus_and_other_models_are_not_compared(certified, config, changes, words):
    _, said = certified(make(1, 8, **changes), **config)
    where = said.splitlines()[-2]
    assert where.startswith("  where this stands: nothing to compare with: ")
    assert words in where
