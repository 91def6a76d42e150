"""The results page is self-contained, valid, complete and safe to open, whatever the logs hold."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from review.__main__ import main
from review.report.page import build_page, write_report
from review.results.score import load_results
from review.verdict.checking import check, judge

VOID = {"meta", "br", "wbr", "link", "img", "input", "hr"}
SELF_CLOSING = {"line", "circle", "rect", "polyline"}  # as inline SVG writes them
LOADS = {"src", "srcset", "data", "action", "poster", "background"}
LOADS |= {"formaction", "xlink:href"}
FOREIGN = {"script", "link", "img", "iframe", "object", "embed", "base", "form"}


class Page(HTMLParser):
    """Parses strictly: every element is closed in its place, every id unique; collects what tests
    ask for.
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


def page_of(target: Path, with_check: bool = False) -> Page:
    """The parsed page of a target."""
    judged = check if with_check else verdicts
    return Page(build_page(judged(target)))


def verdicts(target: Path):
    return [*map(judge, load_results(target))]


@pytest.fixture(scope="module")
def page(tmp_path_factory, make_submission):
    """The page of a valid submission, with what `check` says."""
    folder = tmp_path_factory.mktemp("report") / "EXAMPLE"
    return page_of(make_submission(folder), with_check=True)


def test_the_page_refers_to_nothing_outside_itself(page):
    for tag, attributes in page.elements:
        assert tag not in FOREIGN
        assert not LOADS & attributes.keys(), (tag, attributes)
        if "href" in attributes:
            assert attributes["href"].startswith("#"), attributes
    for loader in ("url(", "@import", "@font-face", "image-set"):
        assert loader not in page.style
    assert "default-src 'none'" in str(page.elements)


def test_the_same_logs_make_the_same_page(submission):
    assert build_page(verdicts(submission)) == build_page(verdicts(submission))


def test_ids_are_unique_and_every_reference_has_its_target(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for reference in (attributes.get("href"), attributes.get("aria-labelledby")):
            if reference:
                assert reference.removeprefix("#") in ids
        clip = re.fullmatch(r"url\(#(.*)\)", attributes.get("clip-path") or "")
        assert clip is None or clip[1] in ids


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
    for tag, attributes in page.elements:
        if tag == "circle":
            assert 0 <= float(attributes["cx"]) <= width
            assert 0 <= float(attributes["cy"]) <= height
        assert "nan" not in (attributes.get("points") or "")


def test_the_verdict_leads_and_equals_the_score(page, submission):
    (result,) = load_results(submission)
    assert judge(result).official
    said = f"{result.score:.4f} minutes by the official rules, unverified"
    assert page.text.index(said) < page.text.index(", official")
    assert f"{result.rcp_point.minimum:,.0f}" in page.text
    assert "package_checker passes" in page.text


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours (WCAG 2)."""
    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_text_and_lines_stand_out_in_both_themes(page):
    blocks = page.style.split(":root")[1:3]
    colours = r"--([\w-]+): (#[0-9a-f]{6})\b"
    light, changed = (dict(re.findall(colours, block)) for block in blocks)
    dark = light | changed
    assert light["bg"] != dark["bg"]
    for theme in (light, dark):
        for name in ("text", "muted", "link", "good", "bad", "warn"):
            assert contrast(theme[name], theme["panel"]) >= 4.5, name
        for name in ("text", "muted", "link"):
            assert contrast(theme[name], theme["bg"]) >= 4.5, name
        for name in ("good", "bad", "warn"):
            assert contrast(theme[name], theme[f"{name}-bg"]) >= 4.5, name
        for name in [f"run-{i}" for i in range(10)]:
            assert contrast(theme[name], theme["panel"]) >= 3, name


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{7*7}}"


def test_hostile_strings_are_shown_and_never_markup(tmp_path, writer):
    name = "result_<img src=x onerror=alert(1)>{{7*7}}.txt"
    log = writer(division=HOSTILE)
    log.change("submission_org", value=HOSTILE)
    log.change("submission_platform", value={"a": [HOSTILE]})
    log.change("opt_name", value=HOSTILE)
    log.change("seed", value=HOSTILE)
    log.change("run_stop", metadata={"status": HOSTILE})
    log.write(tmp_path / "run" / name)
    (tmp_path / "run" / "error_7.txt").write_text(HOSTILE)
    (tmp_path / "run" / "failed_7.txt").write_text("")
    settings = {HOSTILE: {HOSTILE: HOSTILE}, "list": [HOSTILE]}
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    environment = {"gpus": [HOSTILE] * 2, "packages": {HOSTILE: 1}}
    (tmp_path / "run" / "environment.json").write_text(json.dumps(environment))
    page = page_of(tmp_path / "run", with_check=True)
    for tag, attributes in page.elements:
        assert tag not in {"script", "img"}
        assert not any(name.startswith("on") for name in attributes), attributes
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
def test_a_page_is_made_of_every_broken_log(tmp_path, writer, damage):
    log = writer()
    damage(log)
    log.write(tmp_path / "result_0.txt")
    writer(seed=2).write(tmp_path / "result_1.txt")
    page = page_of(tmp_path)
    assert "result_0.txt" in page.text
    assert "Not official yet" in page.text or "Does not count" in page.text


def test_runs_that_fail_and_crash_are_named_with_their_reason(tmp_path, writer):
    stop = {"status": "aborted", "file": "x", "lineno": 1}
    log = writer(target=0.5).change("run_stop", metadata=stop)
    log.write(tmp_path / "result_0.txt")
    writer(seed=2).drop("seed", "cache_clear").write(tmp_path / "result_1.txt")
    (tmp_path / "failed_2.txt").write_text("")
    (tmp_path / "error_2.txt").write_text("the loss is nan at step 7")
    page = page_of(tmp_path, with_check=True)
    for wanted in ("aborted", "cache_clear", "the loss is nan at step 7"):
        assert wanted in page.text
    assert "Does not count" in page.text
    assert "package_checker fails" in page.text


def test_report_writes_a_whole_file_and_says_which(tmp_path, submission, capsys):
    output = tmp_path / "out" / "page.html"
    line = ["report", str(submission / "result_0.txt"), "-o", str(output), "--json"]
    assert main(line) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["passed"] is True
    assert [Path(name) for name in said["files"]] == list(output.parent.iterdir())


def test_two_results_share_a_page(tmp_path, writer):
    for name in ("A", "B"):
        writer(evaluations=3).write(tmp_path / name / "run" / "result_0.txt")
    write_report(verdicts(tmp_path), tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert "2 results" in page.text
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("output", ["", "file.txt/page.html"])
def test_a_page_that_cannot_be_written_is_a_one_line_error(
    tmp_path, submission, capsys, output
):
    (tmp_path / "file.txt").write_text("")
    line = ["report", str(submission / "result_0.txt"), "-o", str(tmp_path / output)]
    assert main(line) == 2
    error = capsys.readouterr().err
    assert error.startswith("review: error: ")
    assert error.count("\n") == 1


def test_the_verdict_names_the_log_that_it_is_about(submission):
    path = submission / "result_3.txt"
    old, new = (
        f'"key": "max_sequence_length", "value": {value}' for value in (512, 128)
    )
    path.write_text(path.read_text().replace(old, new))
    page = page_of(submission, with_check=True)
    assert "max_sequence_length is 128, 512 expected, in result_3.txt" in page.text


def test_findings_name_files_as_seen_from_the_submission(submission):
    (submission / "package_checker_params").mkdir()
    (submission / "scaling.json").write_text("{}")
    (submission / "result_3.txt").unlink()
    (submission / "result_11.txt").symlink_to("nowhere")
    (submission.parents[1] / "other" / "bert").mkdir(parents=True)
    page = page_of(submission.parents[2], with_check=True)
    for name in ("package_checker_params", "scaling.json", "result_11.txt", "other"):
        assert name in page.text
    assert str(submission.parents[2]) not in page.text
