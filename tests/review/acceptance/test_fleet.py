"""Many machines over time: a baseline by kind, each machine's place and history; JSON, Prometheus."""

import json
import re

import numpy as np
import pytest

from review.__main__ import main
from review.acceptance import fleet, schema
from review.acceptance.verdict import judge
from review.logs.output import ReviewError, json_text

from .made_up import make, write

DAY = 86400
FIGURES = ("parallel", "matmul", "copy")


def write_tests(folder, machines=8, tests=10, slow=((), 0, 1.0), kind="DGX, 8 x H100"):
    """Verdicts of each machine by day. slow: (machines, from which test on, factor)."""
    generator = np.random.default_rng(0)
    which, since, factor = slow
    for machine in range(machines):
        level = 100 * (1 + 0.004 * generator.standard_normal())
        for number in range(tests):
            late = factor if machine in which and number >= since else 1.0
            noise = 1 + 0.003 * generator.standard_normal(len(FIGURES))
            rates = dict(zip(FIGURES, (level * late * noise).tolist(), strict=True))
            own = {"kind": kind, "state": "pass", "figures": rates}
            verdict = {"version": 1, "ended": 1e9 + number * DAY}
            path = folder / f"certify_{machine}_{number}"
            path.mkdir(parents=True)
            verdict |= {"machines": {f"node{machine}": own}}
            (path / "certify.json").write_text(json.dumps(verdict))


def odd(folder) -> dict[str, list[str]]:
    return {
        machine.name: [words for _, words in machine.look]
        for baseline in fleet.fleet([folder])
        for machine in baseline.machines
        if machine.reasons
    }


def test_healthy_machines_have_a_baseline_and_nothing_to_look_at(tmp_path):
    write_tests(tmp_path, machines=30)
    (baseline,) = fleet.fleet([tmp_path])
    assert set(baseline.figures) == {*FIGURES}
    centers, spreads = zip(*baseline.figures.values(), strict=True)
    assert centers == pytest.approx([100] * 3, rel=0.01)
    assert max(spreads) < 0.01
    assert odd(tmp_path) == {}
    # A config may expect it.
    expected = str(tmp_path / "good")
    assert main(["certify", "--fleet", str(tmp_path), "--expect", expected]) == 0
    text = (tmp_path / "good.sh").read_text().partition("=")[2].strip().strip("'")
    assert set(schema.Expected(text=text).figures()) == {*FIGURES}


@pytest.mark.parametrize("factor", [0.93, 0.8, 0.3, 0.05])
@pytest.mark.parametrize("since", [0, 4, 7])
def test_a_machine_that_got_slower_is_the_first_to_look_at(tmp_path, factor, since):
    write_tests(tmp_path, slow=((3,), since, factor))
    found = odd(tmp_path)
    assert [*found] == ["node3"]
    steps = [re.search(r"test (\d+) of 10", words) for words in found["node3"]]
    assert {int(step[1]) for step in steps if step} == ({since + 1} if since else set())


def test_a_quarter_of_bad_machines_does_not_move_the_baseline(tmp_path):
    write_tests(tmp_path, machines=12, slow=((0, 4, 9), 0, 0.5))
    (baseline,) = fleet.fleet([tmp_path])
    assert baseline.figures["copy"][0] == pytest.approx(100, rel=0.01)
    assert {*odd(tmp_path)} == {"node0", "node4", "node9"}


@pytest.mark.parametrize(("machines", "names"), [(3, []), (4, ["node2"])])
def test_of_three_machines_none_is_the_odd_one(tmp_path, machines, names):
    write_tests(tmp_path, machines, slow=((2,), 0, 0.8))
    assert [*odd(tmp_path)] == names


def test_machines_of_another_kind_are_not_compared(tmp_path):
    other = {"machines": 1, "slow": ((0,), 0, 0.2), "kind": "another, 4 x A100"}
    write_tests(tmp_path / "a")
    write_tests(tmp_path / "b", **other)
    assert odd(tmp_path) == {}
    with pytest.raises(ReviewError, match="several kinds"):
        fleet.write_expected(fleet.fleet([tmp_path]), tmp_path / "good")


def test_records_without_a_json_are_judged_and_a_folder_without_tests_is_an_error(
    tmp_path, capsys
):
    write(tmp_path / "run", make(4, 2))
    assert main(["certify", "--fleet", str(tmp_path), "--json"]) == 0
    (kind,) = json.loads(capsys.readouterr().out)["kinds"]
    names = [machine["name"] for machine in kind["machines"]]
    assert names == [f"node{number}" for number in range(4)]
    (tmp_path / "empty").mkdir()
    assert main(["certify", "--fleet", str(tmp_path / "empty")]) == 2


TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
TYPES |= {"number": (int, float), "null": type(None)}


def fits(value, rule) -> bool:
    """The part of JSON Schema that ours uses."""
    wanted = rule.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if wanted and not any(isinstance(value, TYPES[one]) for one in wanted):
        return False
    if value not in rule.get("enum", [value]) or value != rule.get("const", value):
        return False
    if isinstance(value, list):
        return all(fits(one, rule.get("items", {})) for one in value)
    if not isinstance(value, dict):
        return True
    others = rule.get("additionalProperties", {})
    known = rule.get("properties", {})
    whole = {*rule.get("required", [])} <= {*value}
    return whole and all(
        fits(own, known.get(name, others)) for name, own in value.items()
    )


@pytest.mark.parametrize("slow", [{}, {("parallel", 3): 1.5}])
def test_a_verdict_fits_its_schema(repository, slow):
    path = repository / "review/acceptance/certify.schema.json"
    rule = json.loads(path.read_text())
    verdict = json.loads(json_text(judge(make(4, 2, slow=slow))))
    assert fits(verdict, rule)
    states = [own["state"] for own in verdict["machines"].values()]
    assert states == ["pass", "fail" if slow else "pass", "pass", "pass"]
    assert [*verdict["machines"]] == [f"node{number}" for number in range(4)]
    assert not fits(verdict | {"version": 2}, rule)
    del verdict["machines"]
    assert not fits(verdict, rule)


def test_prometheus_reads_a_line_for_each_figure(certified, tmp_path):
    saved, rates = tmp_path / "certify.json", tmp_path / "certify.prom"
    options = "--save", str(saved), "--prometheus", str(rates)
    assert certified(make(4, 2), *options)[0] == 0
    line = re.compile(r'[a-z_]+\{([a-z]+="([^"\\\\]|\\\\.)*",?)+\} [-+.e\d]+')
    lines = rates.read_text().splitlines()
    values = [one for one in lines if not one.startswith("#")]
    assert 'certify_state{machine="node0"} 0' in values
    assert all(line.fullmatch(one) for one in values)
    assert json.loads(saved.read_text())["state"] == "pass"


def test_the_page_of_a_fleet_lists_whom_to_look_at_first_and_escapes_names(tmp_path):
    write_tests(tmp_path / "a", slow=((3,), 5, 0.8), kind="<b>, 8 x H100")
    write_tests(tmp_path / "b", machines=2, kind="another, 4 x A100")
    page, rates = tmp_path / "page.html", tmp_path / "fleet.prom"
    command = ["certify", "--fleet", str(tmp_path), "-o", str(page)]
    assert main([*command, "--prometheus", str(rates)]) == 3
    text = page.read_text()
    assert "<strong>1 to look at</strong>" in text
    assert text.count('class="warn-text">node3<') == 1
    places = text.partition('<table class="place">')[2]
    assert re.findall(r'<th scope="row">(\w+)<', places)[:2] == ["node3", "node0"]
    assert "8 x &lt;b&gt;, 8 x H100" in text
    assert "Fewer than 4 machines" in text
    assert "http" not in re.sub(r'"http-equiv|http-equiv=', "", text)
    assert len(re.findall("^certify_state{", rates.read_text(), re.M)) == 10
