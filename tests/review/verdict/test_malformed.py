"""Whatever a file holds, every command ends with an exit code and at most one line of error: never
a traceback.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from review.__main__ import main
from review.logs.mllog import read_log
from review.results.run import run_of
from review.results.score import load_results
from review.rulebook.compliance import package_folder, rulesets

from .damage import system

FAST = [
    ["show"],
    ["show", "--json"],
    ["compare", "--json"],
    ["watch", "--all", "--once"],
]


def run_all(folder, capsys, commands=FAST):
    """Runs the commands on a folder, as an exception would escape main; returns the JSON of
    `show`.
    """
    for command, *options in commands:
        targets = [str(folder)] * (2 if command == "compare" else 1)
        code = main([command, *options, *targets])
        shown = capsys.readouterr()
        assert code in (0, 1, 2), (command, options)
        assert shown.err.count("\n") <= 1, shown.err
        assert (code == 2) == shown.err.startswith("review: error: ")
        if "--json" in options and code != 2:
            json.loads(shown.out, parse_constant=_no_json)
    return load_results(folder)


def _no_json(name):
    pytest.fail(f"{name} is not JSON")


def real_log(writer, ranks=1):
    log = writer()
    start = next(line for line in log.lines if line["key"] == "init_start")
    log.lines[1:1] = [dict(start) for _ in range(ranks - 1)]
    return log


ODD_FILES = {
    "empty": b"",
    "one newline": b"\n",
    "binary": bytes(range(256)) * 64,
    "token alone": b":::MLLOG ",
    "token and brace": b":::MLLOG {",
    "null": b":::MLLOG null\n",
    "list": b":::MLLOG []\n",
    "number": b":::MLLOG 1e999\n",
    "nesting": b":::MLLOG " + b"[" * 30_000,
    "empty object": b":::MLLOG {}\n",
    "utf-16": ":::MLLOG {}\n".encode("utf-16"),
    "nul bytes": b"\0" * 5000,
    "long line": b"x" * 2_000_000,
    "huge integer": b':::MLLOG {"time_ms": 1'
    + b"0" * 400
    + b', "key": "run_start", "value": null, "metadata": {}}\n',
    "infinite time": b':::MLLOG {"time_ms": Infinity, "key": "run_start", "value": null, "metadata": {}}\n',
    "key is a list": b':::MLLOG {"time_ms": 1, "key": ["seed"], "value": 1, "metadata": {}}\n',
    "key is an object": b':::MLLOG {"time_ms": 1, "key": {}, "value": {}, "metadata": []}\n',
}


def test_odd_files_are_rows_and_no_traceback(tmp_path, capsys):
    for number, content in enumerate(ODD_FILES.values()):
        (tmp_path / f"result_{number}.txt").write_bytes(content)
    (result,) = run_all(tmp_path, capsys, [*FAST, ["check"], ["check", "--json"]])
    assert len(result.runs) == len(ODD_FILES)
    assert not any(run.compliant for run in result.runs)


def test_odd_files_among_good_ones_cost_no_more_than_themselves(submission, capsys):
    (submission / "result_0.txt").write_bytes(ODD_FILES["binary"])
    (result,) = run_all(submission, capsys, [["show"]])
    assert [run.compliant for run in result.runs] == [False] + [True] * 9
    assert result.score is not None


@pytest.mark.parametrize("name", ["number_of_nodes", "accelerators_per_node"])
def test_a_count_of_any_length_stops_no_command(name, submission, capsys):
    for digits in (10, 400, 5000):
        system(**{name: "1" * digits})(submission)
        (result,) = run_all(submission, capsys, [["show", "--json"], ["league"]])
        assert result.accelerators is None


def test_a_pipe_in_place_of_a_reason_holds_no_command(submission, capsys):
    # The timeout of a test ends one that waits for a writer.
    os.mkfifo(submission / "error_10.txt")
    (result,) = run_all(submission, capsys, [*FAST, ["league"], ["check"]])
    assert "without a reason" in result.crashes[10]


def test_only_the_start_of_a_reason_is_read(submission):
    with open(submission / "error_10.txt", "wb") as file:
        file.write(b"out of memory\n")
        file.truncate(1 << 40)
    assert load_results(submission)[0].crashes == {10: "out of memory"}


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(end=st.integers(0, 14_000))
def test_truncated_logs(end, writer, tmp_path, capsys):
    (tmp_path / "result_0.txt").write_bytes(writer(evaluations=5).text().encode()[:end])
    commands = [["show", "--json"], ["watch", "--once", "--json"]]
    (result,) = run_all(tmp_path, capsys, commands)
    assert result.runs[0].status in ("empty", "incomplete", "success")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.text(max_size=3), children, max_size=3)
    ),
    max_leaves=5,
)
FIELD = st.sampled_from(
    ["key", "value", "metadata", "time_ms", "event_type", "epoch_num", "status"]
)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32),
    edits=st.lists(st.tuples(FIELD, JSON), min_size=1, max_size=30),
)
def test_wrong_types_anywhere(seed, edits, writer, tmp_path, capsys):
    log, choose = writer(evaluations=4), random.Random(seed)
    for field, value in edits:
        line = choose.choice(log.lines)
        if field in ("epoch_num", "status") and isinstance(line.get("metadata"), dict):
            line["metadata"][field] = value
        else:
            line[field] = value
    log.write(tmp_path / "result_0.txt")
    run_all(tmp_path, capsys)


def test_srun_prefixes_and_colours_change_nothing(writer, tmp_path, capsys):
    plain = run_of(read_log(writer().write(tmp_path / "plain" / "result_0.txt")))
    lines = writer().text().splitlines()
    prefixed = [
        f"{i % 16:>2}: \x1b[32m[rank{i}]\x1b[0m {line}\r"
        for i, line in enumerate(lines)
    ]
    noise = "\n 3: step 100 loss 2.5 it/s\n\n"
    path = tmp_path / "noisy" / "result_0.txt"
    path.parent.mkdir()
    path.write_bytes(noise.join([*prefixed, ""]).encode())
    run = run_of(read_log(path))
    assert run.compliant
    for name in ("minutes", "samples", "seeds", "final_accuracy"):
        assert getattr(run, name) == getattr(plain, name), name
    run_all(path.parent, capsys)


def test_3472_ranks_in_900_kilobytes_are_counted(writer, tmp_path, capsys):
    path = real_log(writer, ranks=3472).write(
        tmp_path / "result_0.txt", prefix="1234: "
    )
    assert path.stat().st_size > 600_000
    (result,) = run_all(tmp_path, capsys)
    assert result.accelerators == 3472
    assert result.runs[0].compliant


def test_logs_without_evaluation_events_still_have_their_time(writer, tmp_path, capsys):
    writer().drop("eval_start", "eval_stop", "eval_accuracy", "tracked_stats").write(
        tmp_path / "result_0.txt"
    )
    (result,) = run_all(tmp_path, capsys)
    (run,) = result.runs
    assert run.minutes == pytest.approx(3.7, abs=0.1)
    assert run.samples == 17 * 150_000  # train_samples
    assert run.evaluations == []
    assert not run.compliant


def test_other_frameworks_count_samples_in_their_own_way(writer, tmp_path, capsys):
    log, place = writer(), {"file": "run.cc", "lineno": 1}
    for line in log.lines:
        if (samples := line["metadata"].get("epoch_num")) is not None:
            line["metadata"] = {"step_num": samples // 768, **place}
    log.write(tmp_path / "result_0.txt")
    (result,) = run_all(tmp_path, capsys)
    assert result.runs[0].samples == pytest.approx(17 * 150_000, rel=0.001)
    assert not result.runs[0].compliant  # the official checker wants epoch_num


def test_evaluations_that_are_logged_after_the_run_keep_their_times(
    writer, tmp_path, capsys
):
    log = writer()
    late = [line for line in log.lines if line["key"] in ("eval_accuracy", "run_stop")]
    log.lines = [
        line
        for line in log.lines
        if line not in late and line["key"] != "tracked_stats"
    ] + late
    log.drop("eval_start", "eval_stop").change("cache_clear", value=None)
    path = log.write(tmp_path / "result_0.txt", prefix="\n")
    (result,) = run_all(tmp_path, capsys)
    (run,) = result.runs
    assert run.compliant
    assert (len(run.evaluations), run.samples) == (17, 17 * 150_000)
    assert run.last_rate == pytest.approx(11_449, abs=2)
    assert main(["check", str(path)]) == 0
    shown = capsys.readouterr().out
    assert " s earlier than line " in shown
    assert "cache_clear" not in shown


def earlier_round(log):
    """The log as ruleset 2.0.0 wants it: epsilon of another name, and every tensor of BERT-large
    initialised.
    """
    rules = (
        package_folder() / "compliance_checker" / "training_2.0.0" / "closed_bert.yaml"
    ).read_text()
    log.drop("opt_lamb_epsilon", "weights_initialization")
    at = next(i for i, line in enumerate(log.lines) if line["key"] == "seed")
    line = log.lines[at]
    log.lines.insert(at, line | {"key": "opt_epsilon", "value": 1e-6})
    for tensor in dict.fromkeys(re.findall(r'"((?:bert|cls)/[^"]+)"', rules)):
        metadata = line["metadata"] | {"tensor": tensor}
        log.lines.insert(
            at,
            line
            | {"key": "weights_initialization", "value": None, "metadata": metadata},
        )
    return log


def test_logs_of_an_earlier_round_name_their_ruleset(submission, writer, capsys):
    for path in submission.glob("result_*.txt"):
        number = int(path.stem[7:])
        earlier_round(
            writer(seed=number, start_ms=1_650_000_000_000 + 600_000 * number)
        ).write(path)
    assert main(["show", str(submission)]) == 0
    assert "another round: try --ruleset 2.0.0" in capsys.readouterr().out
    assert main(["show", "--ruleset", "2.0.0", str(submission)]) == 0
    assert ", official" in capsys.readouterr().out
    assert main(["check", str(submission)]) == 1
    assert "check with --ruleset 2.0.0" in capsys.readouterr().out
    assert main(["check", "--ruleset", "2.0.0", str(submission)]) == 0


@pytest.mark.parametrize("ruleset", rulesets()[:2])
def test_a_round_without_reference_points_can_be_shown(ruleset, submission, capsys):
    assert main(["show", "--ruleset", ruleset, str(submission)]) == 0
    assert "min" in capsys.readouterr().out


def test_a_folder_or_a_link_to_nowhere_named_like_a_log(tmp_path, writer, capsys):
    writer().write(tmp_path / "result_0.txt")
    (tmp_path / "result_1.txt").mkdir()
    (tmp_path / "result_2.txt").symlink_to(tmp_path / "nowhere")
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "result_2.txt cannot be read: No such file or directory" in shown
    assert "3.7123 min" in shown, "one bad file does not hide the rest"
    assert main(["show", str(tmp_path / "result_2.txt")]) == 2
    (tmp_path / "result_2.txt").unlink()
    capsys.readouterr()
    run_all(tmp_path, capsys)


def test_names_with_brackets_spaces_and_bytes_that_are_no_text(
    submission, tmp_path, capsys
):
    folder = tmp_path / os.fsdecode(b"a [bold] \xff b")
    shutil.copytree(submission, folder)
    run_all(folder, capsys, [*FAST, ["check"]])
    assert main(["show", str(folder)]) == 0
    assert "[bold]" in capsys.readouterr().out
