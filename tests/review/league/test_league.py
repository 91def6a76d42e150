"""`league` ranks results, measures their scaling, and ranks the user's own among the published
ones.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess

import pytest

from review.__main__ import main
from review.league.entries import Entry, entry_of, published
from review.league.page import build_page, scaling
from review.league.ranking import League
from review.logs import tree
from review.results.score import load_results
from review.verdict.checking import judge


def entry(system="a", **fields):
    given = {"round": "5.0", "submitter": "EXAMPLE", "accelerator": "X1"}
    given |= {"division": "closed", "checked": True}
    return Entry(system=system, **(given | fields))


def of_size(system, nodes, minutes, rate, **more):
    sizes = {"nodes": nodes, "accelerators": 8 * nodes, "minutes": minutes}
    return entry(system, **sizes, sequences_per_second=rate, **more)


def shown(capsys, *words):
    """What `league --json` says."""
    assert main(["league", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


SCALING = [  # 8, 16 and 64 accelerators at 100%, 90% and 50% of the rate of one
    of_size("one", 1, 8.0, 8000.0),
    of_size("two", 2, 4.4, 14400.0),
    of_size("eight", 8, 2.0, 32000.0),
]


def test_the_digest_holds_every_published_result():
    found = published()
    rounds = "0.7 1.0 1.1 2.0 2.1 3.0 3.1 4.0 4.1 5.0"
    assert " ".join(sorted({one.round for one in found})) == rounds
    assert len(found) == len({(one.round, one.folder) for one in found}) == 346
    by_folder = {(one.round, one.folder): one for one in found}
    lenovo = by_folder["5.0", "Lenovo/results/SR780aV3-8xB200_SXM_180GB/bert"]
    assert (lenovo.minutes, lenovo.joules, lenovo.checked) == (3.5713, 1949215.94, True)
    rates = [one.per_accelerator for one in found if one.per_accelerator]
    assert len(rates) > 330
    assert max(rates) < 1700


def test_the_digest_is_what_the_logs_of_published_results_give(real_folders):
    by_folder = {(one.round, one.folder): one for one in published()}
    for folder in real_folders:
        (result,) = load_results(folder)
        made = entry_of(judge(result), "5.0", folder.parents[3])
        kept = by_folder["5.0", made.folder]
        for name, value in vars(kept).items():
            # Kept with four digits of a minute, one of a rate, none of samples.
            slack = 6e-5 if "minutes" in name else 0.51 if name == "samples" else 0.051
            is_float = isinstance(value, float)
            wanted = pytest.approx(value, abs=slack) if is_float else value
            assert getattr(made, name) == wanted, name


def test_efficiency_is_against_the_smallest_system_of_the_same_kind():
    other_round = entry("old", round="4.1", accelerators=64, sequences_per_second=1.0)
    league = League((), (*SCALING, other_round))
    assert [league.efficiency(one) for one in SCALING] == pytest.approx([1.0, 0.9, 0.5])
    assert league.efficiency(other_round) is None


@pytest.mark.parametrize(("by", "names"), [
    ("minutes", ["eight", "two", "one"]),
    ("per-accelerator", ["one", "two", "eight"]),
    ("energy", ["two"]),
])  # fmt: skip
def test_results_are_ranked_by_what_is_asked_for(by, names):
    entries = [SCALING[0], of_size("two", 2, 4.4, 14400.0, joules=5.0)]
    league = League((SCALING[2],), tuple(entries), by)
    found = {one.system: league.rank(one) for one in league.ranked}
    ranks = {name: rank for rank, name in enumerate(names, 1)}
    assert found == dict.fromkeys(found) | ranks
    assert [*found][: len(names)] == names


def test_equal_results_share_a_rank():
    minutes = {"a": 1.0, "b": 1.0, "c": 2.0}
    entries = [entry(name, minutes=value) for name, value in minutes.items()]
    league = League((), tuple(entries))
    assert [league.rank(one) for one in league.ranked] == [1, 1, 3]


def test_filters_leave_out_what_is_not_asked_for(capsys):
    options = "--published --round 5.0 --division closed --accelerator b200"
    found = shown(capsys, *options.split(), "--accelerators", 8)["results"]
    kinds = {(one["round"], one["division"], one["accelerators"]) for one in found}
    assert kinds == {("5.0", "closed", 8)}
    assert all("B200" in one["accelerator"] for one in found)
    found = shown(capsys, "--published", "--division", "open")["results"]
    assert {one["division"] for one in found} == {"open"}


def test_own_results_stand_among_the_published_ones(submission, capsys):
    found = shown(capsys, submission, "--published")
    (own,) = [one for one in found["results"] if one["own"]]
    (result,) = load_results(submission)
    results = League((), published()).ranked
    faster = [one for one in results if (one.minutes or 99e9) < result.score]
    assert own["minutes"] == pytest.approx(result.score)
    assert own["rank"] == len(faster) + 1
    assert (own["round"], own["accelerators"]) == ("yours", 8)
    assert len(found["results"]) == len(results) + 1 == 296
    closed = 1 + sum(one.division == "closed" for one in faster)
    assert f"rank {closed} of" in found["standing"][0]["said"]


def test_the_table_shows_the_first_and_ones_own(submission, capsys):
    assert main(["league", str(submission), "--published", "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert "293 more: --top 0 shows all 296" in shown
    assert re.search(r"yours +EXAMPLE +dgx +closed +1 x 8 +H100 +768", shown)


@pytest.mark.parametrize("factor", [1e-9, 1.5])
def test_a_factor_beside_ones_own_logs_moves_no_rank(factor, submission, capsys):
    (submission / "scaling.json").write_text(json.dumps({"scaling_factor": factor}))
    (row,) = shown(capsys, submission)["results"]
    (result,) = load_results(submission)
    assert row["minutes"] == row["published_minutes"] == pytest.approx(result.score)


def test_published_means_the_committed_factor_and_minutes_that_of_the_rules():
    by_folder = {(one.round, one.folder): one for one in published()}
    inspur = by_folder["2.0", "Inspur/results/nf5488a5_pytorch/bert"]
    assert (inspur.minutes, inspur.published_minutes) == (16.8901, 16.1826)
    gigabyte = by_folder["2.1", "GIGABYTE/results/G492-ZD2_pytorch/bert"]
    assert gigabyte.published_minutes > 1.01 * 16.1, "the factor that was committed"


def test_the_same_logs_are_one_row_that_names_every_round(capsys):
    again = {"minutes": 2.0, "samples": 2e6, "sequences_per_second": 1e4}
    first = entry("x", round="3.1", **again)
    other = entry("y", round="4.0", minutes=3.0)
    league = League((), (entry("x", round="4.0", **again), other, first))
    assert league.ranked == [first, other]
    assert (league.rank(other), league.rounds(first)) == (2, ["3.1", "4.0"])
    found = shown(capsys, "--published")["results"]
    (eos,) = [one for one in found if one["system"].startswith("eos_n434_ngc23.09")]
    assert (eos["rank"], eos["round"], eos["resubmitted"]) == (1, "3.1", ["4.0", "4.1"])


@pytest.mark.parametrize("command", ["league", "show"])
def test_results_of_other_benchmarks_are_left_out_by_name(command, submission, capsys):
    other = submission.with_name("retinanet")
    shutil.copytree(submission, other)
    for path in other.glob("result_*.txt"):
        text = path.read_text().replace('"value": "bert"', '"value": "retinanet"')
        path.write_text(text)
    assert main([command, str(submission.parent), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert len(found["results"] if command == "league" else found) == 1
    assert "skipped in" in said.err
    assert "1 results of other benchmarks (retinanet)" in said.err
    assert main([command, str(other)]) == 2
    assert "no BERT results, only retinanet" in capsys.readouterr().err


def test_logs_of_a_round_whose_rules_reject_them_are_marked(submission, capsys):
    for path in submission.glob("result_*.txt"):
        path.write_text(path.read_text().replace('"cache_clear"', '"cache_cleared"'))
    assert main(["league", str(submission)]) == 0
    shown = capsys.readouterr().out
    (result,) = load_results(submission)
    assert result.score is None
    assert f"{result.raw.minutes:.4f}*" in shown
    assert "* not accepted" in shown


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "needs a folder of results, --published, or both"),
    (["nowhere"], "no such file or folder"),
    (["--published", "--round", "9.9"], "no result is left to rank"),
    (["--published", "--top", "-1"], "must be 0 or more"),
])  # fmt: skip
def test_wrong_input_is_a_one_line_error(arguments, says, capsys):
    assert main(["league", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_the_page_draws_scaling_and_escapes_names(submission, tmp_path, capsys):
    hostile = tmp_path / "EXAMPLE" / "results" / "<b>x"
    shutil.move(submission.parent, hostile)
    shutil.move(tree.system_file(submission), tree.system_file(hostile / "bert"))
    output = tmp_path / "league.html"
    assert main(["league", str(hostile), "--published", "-o", str(output)]) == 0
    page = output.read_text()
    assert not re.search(r'(src|href)=(?!"#)|@import|url\((?!#)', page)
    assert "<b>" not in page
    assert "&lt;b&gt;x" in page
    assert "Time to train over accelerators" in page
    assert page.count("<tr") == 1 + 296
    headings = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', page)
    assert headings[:3] == ["rank", "minutes", "/accel"], "in sight at once"
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", page.split("<tbody>")[1])
    own = dict(zip(headings, cells, strict=False))
    minutes = f"{load_results(hostile)[0].score:.4f}"
    assert (own["round"], own["minutes"]) == ("yours", minutes), "on top"
    assert page.count('<tr class="own">') == page.count("yours, unverified") == 1
    assert "Unverified until MLCommons has reviewed it" in html.unescape(page)


def test_the_picture_of_the_readme_is_what_its_command_makes(
    repository, tmp_path, capsys
):
    readme = (repository / "README.md").read_text()
    (command,) = re.findall(r"`python -m review (league [^`]*--svg \S+)`", readme)
    *words, file = command.split()
    assert main([*words, str(tmp_path / "league.svg")]) == 0
    assert (tmp_path / "league.svg").read_text() == (repository / file).read_text()
    assert f"]({file})" in readme
    words = ["--accelerators", "8", "--svg", str(tmp_path / "none.svg")]
    assert main(["league", "--published", *words]) == 2
    assert "no chart, since" in capsys.readouterr().err


def test_only_the_script_of_the_page_may_run():
    page = build_page(League((), published()))
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src"
    assert f"{policy} 'sha256-{digest}'\">" in page
    assert not re.search(r"\son\w+=|javascript:", page), "no other handler"
    assert '<div class="tools" hidden>' in page, "nothing is offered without a script"


def in_a_browser(page, steps, tmp_path):
    """The visible ranks, from the top, after steps of a script; skips without a browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here")
    asked = "[...document.querySelectorAll('tbody tr')].filter((row) => !row.hidden).map((row) => row.cells[0].textContent)"
    driven = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    driven += f"<script>{steps}; document.title = 'ranks:' + ({asked}).join();</script>"
    (tmp_path / "driven.html").write_text(driven)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    options.append(f"--user-data-dir={tmp_path / 'profile'}")
    command = [browser, *options, (tmp_path / "driven.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r"<title>ranks:([^<]*)</title>", shown)
    assert found, "the script of the page failed"
    return found[1].split(",")


def test_the_table_is_searched_and_sorted_with_ones_own_row_on_top(tmp_path):
    old = of_size("old", 0.5, 30.0, 500.0, round="0.7")
    page = build_page(League((SCALING[1],), (SCALING[0], SCALING[2], old)))
    assert in_a_browser(page, "", tmp_path) == ["2", "1", "3", "4"]
    search = "search.value = '0.7 closed'; search.dispatchEvent(new Event('input'))"
    assert in_a_browser(page, search, tmp_path) == ["2", "4"]
    order = "heads.find((head) => head.textContent === '{}').firstChild.click();"
    assert in_a_browser(page, order.format("/accel"), tmp_path) == ["2", "3", "1", "4"]
    assert in_a_browser(page, order.format("system"), tmp_path) == ["2", "1", "4", "3"]
    twice = in_a_browser(page, 2 * order.format("system"), tmp_path)
    assert twice == ["2", "3", "4", "1"]


def test_curves_are_of_systems_in_several_sizes():
    league = League(tuple(SCALING), ())
    points = scaling(league).series[0].points
    assert [(x, y) for x, y, _ in points] == [(8, 8.0), (16, 4.4), (64, 2.0)]
    assert "yours unverified" in scaling(league).alt
    assert "unverified" not in scaling(League((), tuple(SCALING))).alt
    assert scaling(League((SCALING[0],), ())) is None
    one = entry("own", accelerator="Y", accelerators=8, minutes=5.0)
    drawn = scaling(League((one,), tuple(SCALING)))
    assert drawn.series[0].name == "yours, Y", "also of one size"
    assert "yours unverified" in drawn.alt
    assert "<svg" not in build_page(League((SCALING[0],), ()))


def test_the_curve_of_an_accelerator_spans_all_sizes_that_were_published():
    series = scaling(League((), published())).series
    reach = {line.name: (line.points[0].x, line.points[-1].x) for line in series}
    sizes = [
        one.accelerators
        for one in published()
        if "A100" in one.accelerator and one.division == "closed" and one.accelerators
    ]
    assert reach["A100"] == (min(sizes), max(sizes))


def test_columns_are_sorted_by_what_they_mean():
    old = entry("old", round="0.7", minutes=30.0, accelerators=4)
    page = build_page(League((), (*SCALING, old)))
    cell = r'<td data-label="{}" data-key="([^"]*)"'
    sizes = re.findall(cell.format("nodes x accel."), page)
    assert {*sizes} == {"4", "8", "16", "64"}
    assert "0.7" in re.findall(cell.format("round"), page), "not all of its rounds"
    greatest = r'<th scope="col"[^>]*data-side="-1">([^<]*)</th>'
    assert sorted(re.findall(greatest, page)) == ["/accel", "efficiency", "seq/s"]
