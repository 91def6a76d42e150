"""`league` ranks results, measures their scaling, and ranks the user's own among the published
ones; their table is made from checkouts alone, and says what they lack.
"""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess

import pytest

from review.league.entries import PUBLISHED, Entry, published
from review.league.page import build_page, scaling
from review.league.ranking import League
from review.logs import tree
from review.logs.output import ReviewError
from review.results.score import load_results

from ..conftest import git
from ..verdict.damage import drop, duplicate, put
from .remake import COLUMNS, remade


def entry(system="a", **fields):
    given = {"round": "5.0", "submitter": "EXAMPLE", "accelerator": "X1"}
    given |= {"division": "closed", "checked": True}
    return Entry(system=system, **(given | fields))


def of_size(system, nodes, minutes, rate, **more):
    sizes = {"nodes": nodes, "accelerators": 8 * nodes, "minutes": minutes}
    return entry(system, **sizes, sequences_per_second=rate, **more)


@pytest.fixture
def shown(command):
    return lambda *words: command("league", *words, "--json").json


SCALING = [  # 8, 16 and 64 accelerators at 100%, 90% and 50% of the rate of one
    of_size("one", 1, 8.0, 8000.0),
    of_size("two", 2, 4.4, 14400.0),
    of_size("eight", 8, 2.0, 32000.0),
]


def test_the_digest_holds_every_published_result():
    found = published()
    rounds = "0.7 1.0 1.1 2.0 2.1 3.0 3.1 4.0 4.1 5.0"
    assert " ".join(sorted({one.round for one in found})) == rounds
    by_folder = {(one.round, one.folder): one for one in found}
    assert len(found) == len(by_folder) == 346
    lenovo = by_folder["5.0", "Lenovo/results/SR780aV3-8xB200_SXM_180GB/bert"]
    assert (lenovo.minutes, lenovo.joules, lenovo.checked) == (3.5713, 1949215.94, True)
    # Published means the factor that was committed, and minutes that of the rules.
    inspur = by_folder["2.0", "Inspur/results/nf5488a5_pytorch/bert"]
    assert (inspur.minutes, inspur.published_minutes) == (16.8901, 16.1826)
    gigabyte = by_folder["2.1", "GIGABYTE/results/G492-ZD2_pytorch/bert"]
    assert gigabyte.published_minutes > 1.01 * 16.1
    rates = [one.per_accelerator for one in found if one.per_accelerator]
    assert (len(rates) > 330, max(rates) < 1700) == (True, True)


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


def test_filters_leave_out_what_is_not_asked_for(shown):
    options = "--published --round 5.0 --division closed --accelerator b200"
    found = shown(*options.split(), "--accelerators", 8)["results"]
    kinds = {(one["round"], one["division"], one["accelerators"]) for one in found}
    assert kinds == {("5.0", "closed", 8)}
    assert all("B200" in one["accelerator"] for one in found)
    found = shown("--published", "--division", "open")["results"]
    assert {one["division"] for one in found} == {"open"}


def test_own_results_stand_among_the_published_ones(submission, shown):
    found = shown(submission, "--published")
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


def test_the_table_shows_the_first_and_ones_own(submission, command):
    said = command("league", submission, "--published", "--top", 2).out
    assert "293 more: --top 0 shows all 296" in said
    assert re.search(r"yours +EXAMPLE +dgx +closed +1 x 8 +H100 +768", said)


@pytest.mark.parametrize("factor", [1e-9, 1.5])
def test_a_factor_beside_ones_own_logs_moves_no_rank(factor, submission, shown):
    (submission / "scaling.json").write_text(json.dumps({"scaling_factor": factor}))
    (row,) = shown(submission)["results"]
    (result,) = load_results(submission)
    assert row["minutes"] == row["published_minutes"] == pytest.approx(result.score)


def test_the_same_logs_are_one_row_that_names_every_round(shown):
    again = {"minutes": 2.0, "samples": 2e6, "sequences_per_second": 1e4}
    first = entry("x", round="3.1", **again)
    other = entry("y", round="4.0", minutes=3.0)
    league = League((), (entry("x", round="4.0", **again), other, first))
    assert league.ranked == [first, other]
    assert (league.rank(other), league.rounds(first)) == (2, ["3.1", "4.0"])
    found = shown("--published")["results"]
    (eos,) = [one for one in found if one["system"].startswith("eos_n434_ngc23.09")]
    assert (eos["rank"], eos["round"], eos["resubmitted"]) == (1, "3.1", ["4.0", "4.1"])


@pytest.mark.parametrize("word", ["league", "show"])
def test_results_of_other_benchmarks_are_left_out_by_name(word, submission, command):
    other = shutil.copytree(submission, submission.with_name("retinanet"))
    put("submission_benchmark", value="retinanet")(other)
    said = command(word, submission.parent, "--json")
    assert len(said.json["results"] if word == "league" else said.json) == 1
    assert "skipped in" in said.err
    assert "1 results of other benchmarks (retinanet)" in said.err
    status, _, error = command(word, other)
    assert (status, "no BERT results, only retinanet" in error) == (2, True)


def test_logs_of_a_round_whose_rules_reject_them_are_marked(submission, command):
    drop("cache_clear")(submission)
    status, said, _ = command("league", submission)
    (result,) = load_results(submission)
    assert (status, result.score) == (0, None)
    assert f"{result.raw.minutes:.4f}*" in said
    assert "* not accepted" in said


@pytest.mark.parametrize(("arguments", "says"), [
    ("", "needs a folder of results, --published, or both"),
    ("nowhere", "no such file or folder"),
    ("--published --round 9.9", "no result is left to rank"),
    ("--published --top -1", "must be 0 or more"),
])  # fmt: skip
def test_wrong_input_is_a_one_line_error(arguments, says, command):
    status, _, error = command("league", *arguments.split())
    assert (status, says in error, error.count("\n")) == (2, True, 1)


def test_the_page_draws_scaling_and_escapes_names(submission, tmp_path, command):
    hostile = tmp_path / "EXAMPLE" / "results" / "<b>x"
    shutil.move(submission.parent, hostile)
    shutil.move(tree.system_file(submission), tree.system_file(hostile / "bert"))
    output = tmp_path / "league.html"
    assert command("league", hostile, "--published", "-o", output).status == 0
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


def test_the_readme_s_picture_is_what_its_command_makes(repository, tmp_path, command):
    readme = (repository / "README.md").read_text()
    (line,) = re.findall(r"`python -m review (league [^`]*--svg \S+)`", readme)
    *words, file = line.split()
    assert command(*words, tmp_path / "league.svg").status == 0
    assert (tmp_path / "league.svg").read_text() == (repository / file).read_text()
    assert f"]({file})" in readme
    words = ("--published", "--accelerators", 8, "--svg", tmp_path / "none.svg")
    status, _, error = command("league", *words)
    assert (status, "no chart, since" in error) == (2, True)


def test_only_the_script_of_the_page_may_run():
    page = build_page(League((), published()))
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src"
    assert f"{policy} 'sha256-{digest}'\">" in page
    assert not re.search(r"\son\w+=|javascript:", page), "no other handler"
    assert '<div class="tools" hidden>' in page, "nothing is offered without a script"


def in_a_browser(page, steps, tmp_path):
    """The visible ranks, from the top, after each step of a script; skips without a browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here")
    asked = "[...document.querySelectorAll('tbody tr')].filter((row) => !row.hidden).map((row) => row.cells[0].textContent)"
    driven = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    taken = "".join(f"{step}; found.push({asked}.join());" for step in steps)
    driven += f"<script>const found = []; {taken} document.title = 'ranks:' + found.join(' ');</script>"
    (tmp_path / "driven.html").write_text(driven)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    options.append(f"--user-data-dir={tmp_path / 'profile'}")
    command = [browser, *options, (tmp_path / "driven.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r"<title>ranks:([^<]*)</title>", shown)
    assert found, "the script of the page failed"
    return found[1].split()


SEARCH = "search.value = '{}'; search.dispatchEvent(new Event('input'))"
ORDER = "heads.find((head) => head.textContent === '{}').firstChild.click()"


def test_the_table_is_searched_and_sorted_with_ones_own_row_on_top(tmp_path):
    old = of_size("old", 0.5, 30.0, 500.0, round="0.7")
    page = build_page(League((SCALING[1],), (SCALING[0], SCALING[2], old)))
    steps = ["", SEARCH.format("0.7 closed"), SEARCH.format("")]
    steps += [ORDER.format(name) for name in ("/accel", "system", "system")]
    found = in_a_browser(page, steps, tmp_path)
    assert found == ["2,1,3,4", "2,4", "2,1,3,4", "2,3,1,4", "2,1,4,3", "2,3,4,1"]


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
    closed = [one for one in published() if one.division == "closed"]
    a100s = [one for one in closed if "A100" in one.accelerator]
    sizes = [one.accelerators for one in a100s if one.accelerators]
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


def test_the_rows_of_the_stored_table_are_made_again(real_folders, tmp_path):
    checkout = tmp_path / "training_results_v5.0"
    duplicate(real_folders[0].parents[3], checkout)
    for words in ("init -q", "add .", "commit -qm results"):
        git(checkout, *words.split())
    made = remade(tmp_path).splitlines(keepends=True)
    stored = PUBLISHED.read_text(encoding="utf-8").splitlines(keepends=True)
    heading = next(i for i, line in enumerate(stored) if not line.startswith("#"))
    assert made[1] == stored[heading]
    assert len(made) == 4
    assert set(made[2:]) <= set(stored)
    log = next(checkout.rglob("result_3.txt"))
    shutil.rmtree(log.parent)
    lacks = remade(tmp_path).splitlines()[1]
    place = log.parent.relative_to(checkout)
    assert lacks == f"# round 5.0 lacks 10 logs of {place}"


def test_the_stored_table_names_its_commits_and_what_they_lacked():
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines()
    about = [line.split() for line in lines if line.startswith("#")]
    commits = {words[2].rstrip(":") for words in about if len(words) == 4}
    assert commits == {one.round for one in published()}
    lacked = {(words[2], words[-1]) for words in about if "lacks" in words}
    here = {(one.round, one.folder) for one in published()}
    assert len(lacked - here) == 7
    assert len(here) + 7 == 353
    assert lines[len(about)].startswith(",".join(COLUMNS))


def test_what_is_no_checkout_is_an_error_of_one_line(tmp_path):
    with pytest.raises(ReviewError, match="no training_results_v"):
        remade(tmp_path)
    (tmp_path / "training_results_v5.0").mkdir()
    with pytest.raises(ReviewError, match="a git checkout is expected"):
        remade(tmp_path)
