"""Whatever a file holds, every command ends with an exit code and at most one line of error: never a traceback."""

import json
import os
import random
import re
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from review.logs.mllog import read_log
from review.results.run import run_of
from review.results.score import load_results
from review.rulebook.compliance import package_folder, rulesets

from ..conftest import UNTIMED, LogWriter
from .damage import first_of, system

FAST = ["show", "show --json", "compare --json", "watch --all --once"]


@pytest.fixture
def run_all(command):
    """run_all(folder, commands) -> its results, after commands that would let an exception escape."""

    def run(folder, commands=FAST):
        for words in commands:
            targets = [folder] * (2 if words.startswith("compare") else 1)
            code, shown, error = command(*words.split(), *targets)
            assert code in (0, 1, 2), words
            assert error.count("\n") <= 1, error
            assert (code == 2) == error.startswith("review: error: ")
            if "--json" in words and code != 2:
                json.loads(shown, parse_constant=_no_json)
        return load_results(folder)

    return run


def _no_json(name):
    pytest.fail(f"{name} is not JSON")


def of_event(text):
    return b":::MLLOG " + text + b"\n"


ODD_FILES = [
    b"", b"\n", bytes(range(256)) * 64, b":::MLLOG ", b":::MLLOG {", b":::MLLOG " + b"[" * 30_000,
    *map(of_event, (b"null", b"[]", b"1e999", b"{}")), ":::MLLOG {}\n".encode("utf-16"),
    b"\0" * 5000, b"x" * 2_000_000,
    of_event(b'{"time_ms": 1' + b"0" * 400 + b', "key": "run_start", "value": null, "metadata": {}}'),
    of_event(b'{"time_ms": Infinity, "key": "run_start", "value": null, "metadata": {}}'),
    of_event(b'{"time_ms": 1, "key": ["seed"], "value": 1, "metadata": {}}'),
    of_event(b'{"time_ms": 1, "key": {}, "value": {}, "metadata": []}'),
]  # fmt: skip


def test_odd_files_are_rows_and_no_traceback(tmp_path, run_all):
    for number, content in enumerate(ODD_FILES):
        (tmp_path / f"result_{number}.txt").write_bytes(content)
    (result,) = run_all(tmp_path, [*FAST, "check", "check --json"])
    assert [run.compliant for run in result.runs] == [False] * len(ODD_FILES)


@pytest.mark.parametrize("name", ["number_of_nodes", "accelerators_per_node"])
def test_a_count_of_any_length_stops_no_command(name, submission, run_all):
    for digits in (10, 400, 5000):
        system(**{name: "1" * digits})(submission)
        (result,) = run_all(submission, ["show --json", "league"])
        assert result.accelerators is None


def test_a_pipe_in_place_of_a_reason_holds_no_command(submission, run_all):
    # The timeout of a test ends one that waits for a writer.
    os.mkfifo(submission / "error_10.txt")
    (result,) = run_all(submission, [*FAST, "league", "check"])
    assert "without a reason" in result.crashes[10]


def test_only_the_start_of_a_reason_is_read(submission):
    with open(submission / "error_10.txt", "wb") as file:
        file.write(b"out of memory\n")
        file.truncate(1 << 40)
    assert load_results(submission)[0].crashes == {10: "out of memory"}


WHOLE = LogWriter(evaluations=5).text().encode()


@settings(max_examples=20, **UNTIMED)
@given(end=st.integers(0, len(WHOLE)))
def test_truncated_logs(end, tmp_path, run_all):
    (tmp_path / "result_0.txt").write_bytes(WHOLE[:end])
    (result,) = run_all(tmp_path, ["show --json", "watch --once --json"])
    assert result.runs[0].status in ("empty", "incomplete", "success")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.text(max_size=3), children, max_size=3)
    ),
    max_leaves=5,
)
ABOUT = ["epoch_num", "status"]
FIELD = st.sampled_from(["key", "value", "metadata", "time_ms", "event_type", *ABOUT])


@settings(max_examples=20, **UNTIMED)
@given(
    seed=st.integers(0, 2**32),
    edits=st.lists(st.tuples(FIELD, JSON), min_size=1, max_size=30),
)
def test_wrong_types_anywhere(seed, edits, tmp_path, run_all):
    log, choose = LogWriter(evaluations=4), random.Random(seed)
    for field, value in edits:
        line = choose.choice(log.lines)
        if field in ABOUT and isinstance(line.get("metadata"), dict):
            line["metadata"][field] = value
        else:
            line[field] = value
    log.write(tmp_path / "result_0.txt")
    run_all(tmp_path)


def test_srun_prefixes_and_colours_change_nothing(tmp_path, run_all):
    plain = run_of(read_log(LogWriter().write(tmp_path / "plain" / "result_0.txt")))
    noise = "\n 3: step 100 loss 2.5 it/s\n\n"
    lines = enumerate(LogWriter().text().splitlines())
    prefixed = [f"{i:>2}: \x1b[32m[rank{i}]\x1b[0m {line}\r" for i, line in lines]
    (tmp_path / "noisy").mkdir()
    (tmp_path / "noisy" / "result_0.txt").write_text(noise.join([*prefixed, ""]))
    (run,) = run_all(tmp_path / "noisy")[0].runs
    assert run.compliant
    for name in ("minutes", "samples", "seeds", "final_accuracy"):
        assert getattr(run, name) == getattr(plain, name), name


def test_3472_ranks_in_900_kilobytes_are_counted(tmp_path, run_all):
    log = LogWriter()
    at = first_of(log.lines, "init_start")
    log.lines[at:at] = [log.lines[at]] * 3471
    log.write(tmp_path / "result_0.txt", prefix="1234: ")
    (result,) = run_all(tmp_path)
    assert result.accelerators == 3472
    assert result.runs[0].compliant


def test_logs_without_evaluation_events_still_have_their_time(tmp_path, run_all):
    log = LogWriter().drop("eval_start", "eval_stop", "eval_accuracy", "tracked_stats")
    log.write(tmp_path / "result_0.txt")
    (run,) = run_all(tmp_path)[0].runs
    assert run.minutes == pytest.approx(3.7, abs=0.1)
    assert (run.samples, run.evaluations) == (17 * 150_000, []), "train_samples"
    assert not run.compliant


def test_other_frameworks_count_samples_in_their_own_way(tmp_path, run_all):
    log, place = LogWriter(), {"file": "run.cc", "lineno": 1}
    for line in log.lines:
        if (samples := line["metadata"].get("epoch_num")) is not None:
            line["metadata"] = {"step_num": samples // 768, **place}
    log.write(tmp_path / "result_0.txt")
    (run,) = run_all(tmp_path)[0].runs
    assert run.samples == pytest.approx(17 * 150_000, rel=0.001)
    assert not run.compliant, "the official checker wants epoch_num"


def test_evaluations_logged_after_the_run_keep_their_times(tmp_path, run_all, command):
    log = LogWriter().drop("tracked_stats", "eval_start", "eval_stop")
    # Which keeps the order of those of a kind.
    log.lines.sort(key=lambda line: line["key"] in ("eval_accuracy", "run_stop"))
    log.change("cache_clear", value=None)
    path = log.write(tmp_path / "result_0.txt", prefix="\n")
    (run,) = run_all(tmp_path)[0].runs
    assert run.compliant
    assert (len(run.evaluations), run.samples) == (17, 17 * 150_000)
    assert run.last_rate == pytest.approx(11_449, abs=2)
    status, shown, _ = command("check", path)
    assert (status, "cache_clear" in shown) == (0, False)
    assert " s earlier than line " in shown


def earlier_round(log):
    """The log as ruleset 2.0.0 wants it: epsilon of another name, and every tensor of BERT-large initialised."""
    rules = package_folder() / "compliance_checker/training_2.0.0/closed_bert.yaml"
    tensors = re.findall(r'"((?:bert|cls)/[^"]+)"', rules.read_text())
    log.drop("opt_lamb_epsilon", "weights_initialization")
    at = first_of(log.lines, "seed")
    line = log.lines[at]
    weights = line | {"key": "weights_initialization", "value": None}
    log.lines[at:at] = [
        line | {"key": "opt_epsilon", "value": 1e-6},
        *(weights | {"metadata": line["metadata"] | {"tensor": tensor}}
          for tensor in dict.fromkeys(tensors)),
    ]  # fmt: skip
    return log


def test_logs_of_an_earlier_round_name_their_ruleset(submission, command):
    for number in range(10):
        start = 1_650_000_000_000 + 600_000 * number
        log = earlier_round(LogWriter(seed=number, start_ms=start))
        log.write(submission / f"result_{number}.txt")
    ruleset = ("--ruleset", "2.0.0")
    assert "another round: try --ruleset 2.0.0" in command("show", submission).out
    assert ", official" in command("show", submission, *ruleset).out
    status, shown, _ = command("check", submission)
    assert (status, "check with --ruleset 2.0.0" in shown) == (1, True)
    assert command("check", submission, *ruleset).status == 0


def test_a_round_without_reference_points_can_be_shown(submission, command):
    status, shown, _ = command("show", "--ruleset", rulesets()[0], submission)
    assert (status, "min" in shown) == (0, True)


def test_names_have_brackets_and_odd_bytes(submission, tmp_path, run_all, command):
    folder = tmp_path / os.fsdecode(b"a [bold] \xff b")
    shutil.copytree(submission, folder)
    run_all(folder, [*FAST, "check"])
    assert "[bold]" in command("show", folder).out
