"""The results page is self-contained, valid, complete and safe to open, whatever the logs hold."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from review.report.page import build_page, write_report
from review.results.score import load_results
from review.verdict.checking import check, judge

from ..conftest import LogWriter, write_submission
from ..verdict.damage import put

VOID = {"meta", "br", "wbr", "link", "img", "input", "hr"}
SELF_CLOSING = {"line", "circle", "rect", "polyline"}  # as inline SVG writes them
LOADS = {"src", "srcset", "data", "action", "poster", "background"}
LOADS |= {"formaction", "xlink:href"}
FOREIGN = {"script", "link", "img", "iframe", "object", "embed", "base", "form"}


class Page(HTMLParser):
    """Parses strictly, and collects what tests ask for: every element is closed in its place, every
    id unique, every reference has its target; no script, and nothing outside is referred to.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.style = ""
        self.feed(page)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        self._references()

    def _references(self) -> None:
        ids = [about["id"] for _, about in self.elements if "id" in about]
        assert len(ids) == len(set(ids))
        forms = ("{}", "#{}", "url(#{})")
        targets = {"", *(form.format(one) for one in ids for form in forms)}
        for tag, about in self.elements:
            assert tag not in FOREIGN
            assert not LOADS & about.keys(), (tag, about)
            assert not any(name.startswith("on") for name in about), about
            for name in ("href", "aria-labelledby", "clip-path"):
                assert (about.get(name) or "") in targets, about
            assert "href" not in about or about["href"].startswith("#")
        for loader in ("url(", "@import", "@font-face", "image-set"):
            assert loader not in self.style

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in SELF_CLOSING, f"<{tag}/>"
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> is out of place"

    def handle_data(self, data):
        if "style" in self.open:
            self.style += data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def verdicts(target: Path):
    return [*map(judge, load_results(target))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_submission(tmp_path_factory.mktemp("report") / "EXAMPLE")


@pytest.fixture(scope="module")
def page(folder):
    """The page of a valid submission, with what `check` says."""
    return Page(build_page(check(folder)))


def test_the_same_logs_make_the_same_page_which_loads_nothing(folder, page):
    assert build_page(verdicts(folder)) == build_page(verdicts(folder))
    assert "default-src 'none'" in str(page.elements)


def test_every_run_appears_in_the_table_and_the_chart(page):
    runs = [(tag, a["data-run"]) for tag, a in page.elements if "data-run" in a]
    assert [run for tag, run in runs if tag == "tr"] == [*map(str, range(10))]
    assert {run for tag, run in runs if tag == "g"} == {*map(str, range(10))}


def test_a_chart_says_in_words_what_it_shows_and_stays_within_its_frame(page):
    (drawing,) = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert drawing["role"] == "img"
    label = "Masked-LM accuracy over training: 10 of 10 runs reach 0.720."
    assert drawing["aria-label"] == label
    _, _, width, height = map(float, drawing["viewbox"].split())
    circles = [about for tag, about in page.elements if tag == "circle"]
    assert all(0 <= float(about["cx"]) <= width for about in circles)
    assert all(0 <= float(about["cy"]) <= height for about in circles)
    assert "nan" not in str([about.get("points") for _, about in page.elements])


def test_the_verdict_leads_and_equals_the_score(page, folder):
    (result,) = load_results(folder)
    assert judge(result).official
    said = f"{result.score:.4f} minutes by the official rules, unverified"
    assert page.text.index(said) < page.text.index(", official")
    assert f"{result.rcp_point.minimum:,.0f}" in page.text
    assert "package_checker passes" in page.text


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2)."""
    light = 0.0
    for at, share in ((1, 0.2126), (3, 0.7152), (5, 0.0722)):
        value = int(colour[at : at + 2], 16) / 255
        linear = value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        light += share * linear
    return light


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours (WCAG 2)."""
    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


STATES, RUNS = ("good", "bad", "warn"), [f"run-{number}" for number in range(10)]
CONTRASTS = [(name, "panel", 4.5) for name in ("text", "muted", "link", *STATES)]
CONTRASTS += [(name, "bg", 4.5) for name in ("text", "muted", "link")]
CONTRASTS += [(name, f"{name}-bg", 4.5) for name in STATES]
CONTRASTS += [(name, "panel", 3) for name in RUNS]


def test_text_and_lines_stand_out_in_both_themes(page):
    blocks = page.style.split(":root")[1:3]
    colours = r"--([\w-]+): (#[0-9a-f]{6})\b"
    light, changed = (dict(re.findall(colours, block)) for block in blocks)
    assert light["bg"] != changed["bg"]
    for theme in (light, light | changed):
        for name, behind, least in CONTRASTS:
            assert contrast(theme[name], theme[behind]) >= least, (name, behind)


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{7*7}}"


def test_hostile_strings_are_shown_and_never_markup(tmp_path):
    log = LogWriter(division=HOSTILE).change("run_stop", metadata={"status": HOSTILE})
    for key in ("submission_org", "opt_name", "seed"):
        log.change(key, value=HOSTILE)
    log.change("submission_platform", value={"a": [HOSTILE]})
    log.write(tmp_path / "result_<img src=x onerror=alert(1)>{{7*7}}.txt")
    for name, content in {
        "error_7.txt": HOSTILE,
        "failed_7.txt": "",
        "config.json": json.dumps({HOSTILE: {HOSTILE: HOSTILE}, "list": [HOSTILE]}),
        "environment.json": json.dumps({"gpus": [HOSTILE] * 2, "packages": {HOSTILE: 1}}),
    }.items():  # fmt: skip
        (tmp_path / name).write_text(content)
    page = Page(build_page(check(tmp_path)))
    assert "<script>alert(1)</script>" in page.text
    assert "{{7*7}}" in page.text


@pytest.mark.parametrize("damage", [
    lambda log: log.drop("eval_accuracy"),
    lambda log: log.drop("run_start"),
    lambda log: log.drop("run_stop"),
    lambda log: log.drop("global_batch_size"),
    lambda log: log.change("eval_accuracy", value="high"),
    lambda log: log.change("eval_accuracy", value=0.5),
    lambda log: log.change("eval_accuracy", metadata={}),
    lambda log: log.change("tracked_stats", value={"throughput": -1, "loss": "x"}),
    lambda log: log.change("run_stop", time_ms=0),
    lambda log: log.change("run_start", time_ms=10**30),
    lambda log: log.change("init_start", time_ms=-(10**15)),
    lambda log: log.change("eval_start", time_ms=5),
    lambda log: log.change("eval_accuracy", value=1e308),
    lambda log: log.change("eval_accuracy", value=-1),
    lambda log: log.change("eval_accuracy", metadata={"epoch_num": 1e308}),
    lambda log: log.change("tracked_stats", value={"throughput": 1e308, "loss": -1e308}),
    lambda log: log.change("tracked_stats", value={"throughput": 1e-320, "loss": 0}),
    lambda log: log.change("opt_base_learning_rate", value=10**400),
    lambda log: log.drop(*{line["key"] for line in log.lines}),
])  # fmt: skip
def test_a_page_is_made_of_every_broken_log(tmp_path, damage):
    damage(log := LogWriter())
    log.write(tmp_path / "result_0.txt")
    LogWriter(seed=2).write(tmp_path / "result_1.txt")
    page = Page(build_page(verdicts(tmp_path)))
    assert "result_0.txt" in page.text
    assert "Not official yet" in page.text or "Does not count" in page.text


def test_runs_that_fail_and_crash_are_named_with_their_reason(tmp_path):
    stop = {"status": "aborted", "file": "x", "lineno": 1}
    log = LogWriter(target=0.5).change("run_stop", metadata=stop)
    log.write(tmp_path / "result_0.txt")
    log = LogWriter(seed=2).drop("seed", "cache_clear")
    log.write(tmp_path / "result_1.txt")
    (tmp_path / "failed_2.txt").write_text("")
    (tmp_path / "error_2.txt").write_text("the loss is nan at step 7")
    page = Page(build_page(check(tmp_path)))
    wanted = "aborted", "cache_clear", "the loss is nan at step 7"
    for one in (*wanted, "Does not count", "package_checker fails"):
        assert one in page.text


def test_report_writes_a_whole_file_and_says_which(tmp_path, folder, command):
    output = tmp_path / "out" / "page.html"
    log = folder / "result_0.txt"
    status, *_ = said = command("report", log, "-o", output, "--json")
    assert (status, said.json["passed"]) == (0, True)
    assert [*map(Path, said.json["files"])] == [*output.parent.iterdir()] == [output]
    for place in (tmp_path, output / "page.html"):  # a folder, and below a file
        status, _, error = command("report", log, "-o", place)
        assert (status, error.count("\n")) == (2, 1)
        assert error.startswith("review: error: ")


def test_two_results_share_a_page(tmp_path):
    for name in ("A", "B"):
        LogWriter(evaluations=3).write(tmp_path / name / "run" / "result_0.txt")
    write_report(verdicts(tmp_path), tmp_path / "page.html")
    assert "2 results" in Page((tmp_path / "page.html").read_text()).text


def test_the_verdict_names_the_log_that_it_is_about(submission):
    put("max_sequence_length", 3, value=128)(submission)
    page = Page(build_page(check(submission)))
    assert "max_sequence_length is 128, 512 expected, in result_3.txt" in page.text


def test_findings_name_files_as_seen_from_the_submission(submission):
    (submission / "package_checker_params").mkdir()
    (submission / "scaling.json").write_text("{}")
    (submission / "result_3.txt").unlink()
    (submission / "result_11.txt").symlink_to("nowhere")
    (submission.parents[1] / "other" / "bert").mkdir(parents=True)
    page = Page(build_page(check(submission.parents[2])))
    for name in ("package_checker_params", "scaling.json", "result_11.txt", "other"):
        assert name in page.text
    assert str(submission.parents[2]) not in page.text
