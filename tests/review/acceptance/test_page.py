"""The page of an acceptance test: outliers, heat maps, timelines; it loads nothing from elsewhere."""

import html
import json
import re
from dataclasses import replace

import pytest

from review.acceptance.page import write_page
from review.acceptance.schema import RankInfo
from review.acceptance.verdict import certify, judge

from .made_up import chosen, make, telemetry, write


@pytest.fixture
def slow(tmp_path):
    """The folder of a test of four nodes with a slow rank and telemetry."""
    records = make(4, 4, slow={("parallel", 6): 1.3})
    records.telemetry.update({node: telemetry(4, 30) for node in records.nodes})
    return write(tmp_path, records)


def paged(certificate, tmp_path) -> str:
    write_page(certificate, tmp_path / "page.html")
    return (tmp_path / "page.html").read_text()


def test_the_page_shows_verdict_outliers_heat_maps_and_timelines(slow, certified):
    assert certified(None, "-o", str(slow / "page.html"))[0] == 1
    page = (slow / "page.html").read_text()
    assert "<strong>Fail</strong>" in page
    assert '<th scope="row" class="bad-text">rank 6 on node1</th>' in page
    assert page.count('class="panel heat"') == 5
    assert ">0.0<" in page
    assert ">-0.0<" not in page
    assert "Clock of 10 of 16 devices, in MHz: medians 1,755 to 1,755." in page
    (hot,) = re.findall(r'<td class="slow" style="--heat: 1.00" title="([^"]*)"', page)
    assert hot.startswith("rank 6 on node1: 1")
    charts = {f'id="chart-{chart}"' for chart in ("clock", "power", "temperature")}
    assert charts <= {*re.findall(r'id="[\w-]+"', page)}
    assert "http" not in re.sub(r'"http-equiv|http-equiv=', "", page)


def test_json_agrees_with_the_text_and_a_folder_is_no_output(slow, certified):
    status, said = certified(None, "--json")
    found = json.loads(said)
    assert (status, found["state"]) == (1, "fail")
    assert found["findings"][0]["stage"] == "parallel"
    assert [len(seconds) for seconds in found["seconds_per_step"].values()] == [16] * 5
    status, said = certified(None, "-o", str(slow))
    assert (status, "is a folder: name a file" in said) == (2, True)


def test_every_reason_of_the_verdict_is_on_the_page_and_in_its_table(tmp_path):
    of_all = {("together", rank): 1.2 for rank in range(8)}
    records = make(4, 2, slow={("parallel", 5): 1.3} | of_all)
    records.steps["checksum"][chosen(records.steps, rank=2, step=9)] += 1
    records.telemetry["node1"] = telemetry(2, 30)
    records.telemetry["node1"]["xid_count"][-1] += 1
    write(tmp_path, records, expected={"parallel": 400.0, "together": 1e4})
    about = {"duration": 86400, "checksums": [1]}
    (tmp_path / "burn_in.json").write_text(json.dumps(about))
    line = {"repeat": 2, "elapsed": 20.0, "different": {"3": 4}}
    line["seconds"] = dict.fromkeys(map(str, range(8)), 0.1)
    (tmp_path / "burn_in_node0.jsonl").write_text(json.dumps(line) + "\n")
    found = certify(tmp_path)
    each = (found.corrupt, found.burn_in.different, found.findings, found.reached)
    assert all((*each, found.faults)), "one of each"
    assert found.why()[-1].name == "burn-in"
    assert len(found.reasons()) == 7
    page = html.unescape(paged(found, tmp_path))
    shown = [f"<li>{reason}</li>" in page for reason in found.reasons()]
    assert shown == [True] * 7
    table = page.partition('<table class="outliers">')[2].partition("</table>")[0]
    assert table.count('<th scope="row"') == 7
    differ = "its weights differ from the first repeat, first in step 5 of repeat 2"
    assert f">{differ}, 0.01 hours" in table
    assert "10,000 sequences/s expected, " in table
    numbers = page.partition('<table class="numbers stacked">')[2]
    numbers = numbers.partition("</table>")[0]
    assert re.findall(
        r'class="bad-text">([^<]*)</th>.*?"Unit">([^<]*)</td>', numbers
    ) == [
        ("all ranks, each by itself", "ms a step"),
        ("all ranks, each by itself", "sequences/s"),
        ("all ranks, gradients reduced", "sequences/s"),
    ]
    assert ">at least 9,500 (10,000 expected)</td>" in numbers


def test_names_of_nodes_are_text_and_not_markup(certified, tmp_path):
    ranks = {rank: RankInfo(rank, rank, "<b>", "<i>") for rank in range(4)}
    records = replace(make(1, 4), nodes=["<b>"], ranks=ranks)
    certified(records, "-o", str(tmp_path / "page.html"))
    assert "<b>" not in (tmp_path / "page.html").read_text()


def test_the_page_lists_what_the_nodes_have_and_names_cpus(tmp_path):
    found = make(2, 2, starved={})
    for node in found.nodes:
        gpu = {"name": "H100", "serial": f"1{node}"}
        parts = {"node": {"CPUs": 192, "BIOS": None}, "GPU 0": gpu}
        found.hardware[node] = {"parts": parts, "before": {}, "after": {}}
    page = paged(certify(write(tmp_path, found)), tmp_path)
    assert '<th scope="row">2 x node</th><td>CPUs 192</td>' in page
    assert '<th scope="row">serial numbers of node1</th><td>0 1node1</td>' in page
    assert "the software only, the test ran on CPUs" in page
    assert '<p class="signature">Operator: not named' in page
    assert "4 ranks on 2 nodes, on CPUs · " in page


def test_ports_are_one_row_and_their_missing_facts_one_entry_with_all_serial_numbers(
    tmp_path,
):
    found = make(1, 2)
    ports = {f"mlx5_{number}/1": {"state": "ACTIVE", "firmware": None, "GUID": f"c20{number}", "GB/s sent": 45.0 + number} for number in range(8)}  # fmt: skip
    found.hardware["node0"] = {"parts": {"node": {}} | ports, "before": {}, "after": {}}
    found.telemetry["node0"] = telemetry(2, 9)
    found.telemetry["node0"]["celsius"][-1] = 91
    found = replace(found, folder=tmp_path, began=1e9, ended=1e9 + 754)
    (tmp_path / "config.json").write_text(json.dumps({"operator": "A. Tester"}))
    judged = judge(found)
    words, tested = dict(judged.inventory), judged.tested
    assert words["8 x mlx5"] == "state ACTIVE"
    assert words["GUIDs of node0"].startswith("mlx5_0/1 c200, mlx5_1/1 c201, ")
    assert words["GB/s sent by each port in all-reduces of node0"].endswith(" 52.0")
    assert tested["not tested"].count("firmware of mlx5 (not reported)") == 1
    assert [own["Temperature, °C"] for own in judged.highest.values()] == [62, 91]
    assert (tested["duration"], tested["operator"]) == ("12:34", "A. Tester")
    page = paged(judged, tmp_path)
    assert '<th scope="row">rank 1 on node0</th><td class="number">1,755</td>' in page
    assert "Operator: A. Tester" in page
