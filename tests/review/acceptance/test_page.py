"""The page of an acceptance test: outliers, heat maps, timelines; it loads nothing from
elsewhere.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace

import pytest

from review.__main__ import main
from review.acceptance.page import write_page
from review.acceptance.verdict import certify, judge

from .made_up import make, telemetry, write


@pytest.fixture
def folder(tmp_path):
    """A test of four nodes with a slow rank and telemetry."""
    records = make(4, 4, slow={("parallel", 6): 1.3})
    for node in records.nodes:
        records.telemetry[node] = telemetry(4, 30)
    write(tmp_path, records)
    return tmp_path


def test_the_page_shows_verdict_outliers_a_heat_map_for_each_stage_and_timelines(
    folder,
):
    assert main(["certify", str(folder), "-o", str(folder / "page.html")]) == 1
    page = (folder / "page.html").read_text()
    assert "<strong>Fail</strong>" in page
    assert re.search(r'<th scope="row" class="bad-text">rank 6 on node1</th>', page)
    assert page.count('class="panel heat"') == 5
    assert ">0.0<" in page
    assert ">-0.0<" not in page
    assert "Clock of 10 of 16 devices, in MHz: medians 1,755 to 1,755." in page
    (hot,) = re.findall(r'<td class="slow" style="--heat: 1.00" title="([^"]*)"', page)
    assert hot.startswith("rank 6 on node1: 1")
    for chart in ("clock", "power", "temperature"):
        assert f'id="chart-{chart}"' in page
    assert "http" not in re.sub(r'"http-equiv|http-equiv=', "", page)


def test_every_reason_of_the_verdict_is_on_the_page_and_in_its_table(tmp_path):
    records = make(
        4,
        2,
        slow={("parallel", 5): 1.3, **{("together", rank): 1.2 for rank in range(8)}},
    )
    records.steps["checksum"][
        (records.steps["rank"] == 2) & (records.steps["step"] == 9)
    ] += 1
    samples = telemetry(2, 30)
    samples["xid_count"][-1] += 1
    records.telemetry["node1"] = samples
    write(tmp_path, records)
    (tmp_path / "config.json").write_text(
        json.dumps({"expected": {"parallel": 400.0, "together": 1e4}})
    )
    (tmp_path / "burn_in.json").write_text(
        json.dumps({"duration": 86400, "checksums": [1]})
    )
    line = {"repeat": 2, "elapsed": 20.0, "different": {"3": 4}}
    line["seconds"] = dict.fromkeys(map(str, range(8)), 0.1)
    (tmp_path / "burn_in_node0.jsonl").write_text(json.dumps(line) + "\n")
    found = certify(tmp_path)
    assert all(
        (
            found.corrupt,
            found.burn_in.different,
            found.findings,
            found.reached,
            found.faults,
        )
    ), "one of each"
    assert found.why()[-1].name == "burn-in"
    assert len(found.reasons()) == 7
    write_page(found, tmp_path / "page.html")
    page = html.unescape((tmp_path / "page.html").read_text())
    assert [
        reason for reason in found.reasons() if f"<li>{reason}</li>" not in page
    ] == []
    table = page.partition('<table class="outliers">')[2].partition("</table>")[0]
    assert table.count('<th scope="row"') == len(found.reasons())
    assert (
        ">its weights differ from the first repeat, first in step 5 of repeat 2, 0.01 hours"
        in table
    )
    assert "10,000 sequences/s expected, " in table
    numbers = page.partition('<table class="numbers stacked">')[2].partition(
        "</table>"
    )[0]
    marked = re.findall(r'class="bad-text">([^<]*)</th>.*?"Unit">([^<]*)</td>', numbers)
    assert marked == [
        ("all ranks, each by itself", "ms a step"),
        ("all ranks, each by itself", "sequences/s"),
        ("all ranks, gradients reduced", "sequences/s"),
    ]
    assert ">at least 9,500 (10,000 expected)</td>" in numbers


def test_names_of_nodes_are_text_and_not_markup(tmp_path):
    records = make(1, 4)
    object.__setattr__(records, "nodes", ["<b>"])
    ranks = {
        rank: type(info)(rank, rank, "<b>", "<i>")
        for rank, info in records.ranks.items()
    }
    object.__setattr__(records, "ranks", ranks)
    write(tmp_path, records)
    main(["certify", str(tmp_path), "-o", str(tmp_path / "page.html")])
    assert "<b>" not in (tmp_path / "page.html").read_text()


def test_json_agrees_with_the_text(folder, capsys):
    assert main(["certify", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["findings"][0]["stage"]) == ("fail", "parallel")
    assert [len(seconds) for seconds in found["seconds_per_step"].values()] == [16] * 5


def test_a_folder_as_output_is_one_line(folder, capsys):
    assert main(["certify", str(folder), "-o", str(folder)]) == 2
    assert "is a folder: name a file" in capsys.readouterr().err


def test_the_page_lists_what_the_nodes_have_and_names_cpus(tmp_path):
    found = make(2, 2, starved={})
    for node in found.nodes:
        parts = {
            "node": {"CPUs": 192, "BIOS": None},
            "GPU 0": {"name": "H100", "serial": f"1{node}"},
        }
        found.hardware[node] = {"parts": parts, "before": {}, "after": {}}
    write(tmp_path, found)
    write_page(certify(tmp_path), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
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
    words = dict(judged.inventory)
    assert words["8 x mlx5"] == "state ACTIVE"
    assert words["GUIDs of node0"].startswith("mlx5_0/1 c200, mlx5_1/1 c201, ")
    assert words["GB/s sent by each port in all-reduces of node0"].endswith(" 52.0")
    assert judged.tested["not tested"].count("firmware of mlx5 (not reported)") == 1
    assert [own["Temperature, °C"] for own in judged.highest.values()] == [62, 91]
    assert (judged.tested["duration"], judged.tested["operator"]) == (
        "12:34",
        "A. Tester",
    )
    write_page(judged, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert '<th scope="row">rank 1 on node0</th><td class="number">1,755</td>' in page
    assert "Operator: A. Tester" in page
