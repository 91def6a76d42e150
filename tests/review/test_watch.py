"""`watch` follows a log that grows, and its projections hold on published runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from common.durations import duration
from review.__main__ import main
from review.logs.mllog import Log, parse, read_log
from review.logs.output import ReviewError, follow
from review.results.folder import run_folder
from review.results.run import Run
from review.results.run_state import RunState, curve_share
from review.results.score import load_results
from review.watch import LogTail, Runs, find_log, render, wait_for_log


class Grower:
    """A log that grows by ``step`` lines whenever the watcher sleeps, and the clock of the run that
    writes it.
    """

    def __init__(self, path, lines, step=1):
        self.path, self.lines, self.step, self.written, self.now = (
            path,
            lines,
            step,
            0,
            0.0,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def clock(self):
        return self.now / 1000

    def sleep(self, seconds):
        batch = self.lines[self.written : self.written + self.step]
        assert batch, "the watcher goes on after the end of the run"
        self.written += len(batch)
        self.now = batch[-1]["time_ms"]
        with open(self.path, "a") as file:
            file.write("".join(f":::MLLOG {json.dumps(line)}\n" for line in batch))


def ended(state):
    return state.done or state.broken is not None


@pytest.fixture
def states(tmp_path, writer):
    """Every state of a run of 17 evaluations, seen line by line."""
    grower = Grower(tmp_path / "result_0.txt", writer().lines)
    grower.now = grower.lines[0]["time_ms"]
    tail = LogTail(grower.path)
    return list(follow(tail.poll, ended, 1.0, grower.clock, grower.sleep))


def test_a_growing_log_goes_through_the_phases_to_its_end(states):
    phases = list(dict.fromkeys(state.phase for state in states))
    assert phases == [
        "starting",
        "initialising",
        "training",
        "evaluating",
        "finishing",
        "success",
    ]
    assert [state.done for state in states] == [False] * (len(states) - 1) + [True]
    counts = [len(state.run.evaluations) for state in states]
    assert counts == sorted(counts)
    assert counts[-1] == 17


def test_progress_never_goes_back_and_ends_at_all_of_it(states):
    samples = [state.samples for state in states if state.samples is not None]
    assert samples == sorted(samples)
    assert samples[-1] == 17 * 150_000
    assert states[-1].share == 1.0
    assert states[-1].eta is None
    assert all(0 <= state.share <= 1 for state in states if state.share is not None)


def test_the_margin_of_a_finished_run_is_its_samples_above_the_minimum(states):
    final = states[-1]
    assert final.rcp_margin == 17 * 150_000 - final.result.rcp_point.minimum


def test_before_any_evaluation_the_reference_is_the_projection(states):
    first = next(state for state in states if state.phase == "training")
    assert first.projection == pytest.approx(first.result.rcp_point.mean)
    assert first.eta is None  # no speed is known yet


def test_a_run_without_a_target_is_watched_to_its_last_step_and_nothing_of_the_benchmark_is_mentioned(
    tmp_path, writer, capsys
):
    settings = {
        "evaluate": {"target": 0.0, "every_samples": 9},
        "schedule": {"max_steps": 20_000},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    lines = writer().lines
    at = [i for i, line in enumerate(lines) if line["key"] == "eval_stop"][2] + 1
    path = tmp_path / "result_0.txt"
    path.write_text("".join(f":::MLLOG {json.dumps(line)}\n" for line in lines[:at]))
    state = LogTail(path).poll(lines[at - 1]["time_ms"] / 1000)
    end = 20_000 * state.run.batch_size
    assert (state.phase, state.projection, state.share) == (
        "training",
        end,
        450_000 / end,
    )
    assert state.eta is not None
    assert main(["watch", str(path), "--once"]) == 0
    said = capsys.readouterr().out
    assert "accuracy" in said
    for word in (" of 0.72", "RCP", "published"):
        assert word not in said
    (tmp_path / "config.json").unlink()
    assert main(["watch", str(path), "--once"]) == 0
    assert " of 0.72" in capsys.readouterr().out


def test_a_silent_run_is_stalled_after_a_minute(writer):
    lines = writer().lines
    at = next(i for i, line in enumerate(lines) if line["key"] == "eval_accuracy") + 1
    run = written(lines[:at])
    now = lines[at - 1]["time_ms"]
    assert not RunState(single(run), now + 59_000).stalled
    assert RunState(single(run), now + 61_000).stalled
    assert (
        RunState(single(run), now - 5_000).samples == 150_000
    )  # a clock that is behind


def written(lines):
    return Run(
        parse(
            Path("result_0.txt"),
            "".join(f":::MLLOG {json.dumps(x)}\n" for x in lines).encode(),
        )
    )


def single(run):
    return run_folder(run.path.parent, (run,))


def test_the_curve_is_a_function_of_accuracy_that_rises():
    shares = [curve_share(accuracy / 10_000) for accuracy in range(3000, 7300)]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def cut(run, evaluations):
    """The run as it stood right after an evaluation."""
    last = run.evaluations[evaluations - 1]
    events = tuple(event for event in run.log.events if event.line <= last.line)
    return Run(Log(path=run.path, events=events, errors=()), run.ruleset), last.time_ms


@pytest.mark.parametrize(
    ("part", "error"), [(0.3, 0.18), (0.5, 0.14), (0.6, 0.11), (0.7, 0.07), (0.9, 0.05)]
)
def test_projections_of_published_runs_are_near_what_came(real_folders, part, error):
    misses = []
    for run in [
        run
        for folder in real_folders
        for result in load_results(folder)
        for run in result.runs
    ]:
        half, now = cut(run, max(2, int(part * len(run.evaluations))))
        misses.append(RunState(single(half), now).projection / run.samples - 1)
    assert math.sqrt(sum(miss * miss for miss in misses) / len(misses)) < error


OTHER_ROUNDS = {  # batch size, samples between evaluations, accuracies: published logs of other frameworks and rounds
    "448": (
        448,
        150_080,
        "3797 4187 4628 5766 6791 7079 7116 7137 7152 7163 7170 7185 7194 7199 7207",
    ),
    "3072": (3072, 175_000, "7148 7159 7167 7178 7185 7191 7197 7205"),
    "6912": (
        6912,
        228_096,
        "4229 4795 5700 6718 7031 7099 7131 7149 7168 7176 7191 7200",
    ),
}


@pytest.mark.parametrize(
    ("batch", "error"), [("448", 0.1), ("3072", 0.06), ("6912", 0.24)]
)
def test_projections_of_other_rounds_are_within_what_is_documented(
    batch, error, writer
):
    size, interval, accuracies = OTHER_ROUNDS[batch]
    values = [int(value) / 10_000 for value in accuracies.split()]
    first = {"448": 1, "3072": 10, "6912": 4}[
        batch
    ]  # evaluation number of the first value
    total = interval * (first + len(values) - 1)
    lines = [line for line in writer().lines if line["key"] != "eval_accuracy"]
    for line in lines:
        line["value"] = size if line["key"] == "global_batch_size" else line["value"]
    header = lines[
        : next(i for i, line in enumerate(lines) if line["key"] == "run_start") + 1
    ]
    for index, value in enumerate(values[:-1]):
        samples = interval * (first + index)
        header.append(
            {
                "time_ms": 1.75e12 + samples,
                "key": "eval_accuracy",
                "value": value,
                "metadata": {},
            }
        )
        header[-1]["metadata"]["epoch_num"] = samples
        if samples >= 0.6 * total:
            projected = RunState(single(written(header)), 1.75e12).projection
            assert abs(projected / total - 1) < error


def test_the_time_to_go_comes_true_where_the_projection_does(writer, real_folders):
    run = Run(read_log(real_folders[0] / "result_3.txt"))
    half, now = cut(run, 12)
    standing = RunState(single(half), now)
    left = (run.run_stop.time_ms - now) / 1000
    assert standing.eta == pytest.approx(left, rel=0.35)


def test_half_written_lines_are_left_for_the_next_look(tmp_path, writer):
    path = writer().write(tmp_path / "result_0.txt")
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    tail = LogTail(path)
    standing = tail.poll(0)
    assert not standing.done
    assert not standing.run.log.errors
    path.write_bytes(data)
    assert tail.poll(0).done


def test_the_log_is_followed_to_where_the_launcher_moves_it(tmp_path, writer):
    path = writer().drop("run_stop").write(tmp_path / "running_3" / "result_3.txt")
    tail = LogTail(path)
    assert not tail.poll(0).done
    (tmp_path / "failed_3.txt").write_bytes(path.read_bytes())
    (tmp_path / "error_3.txt").write_text("rank 5 ran out of memory\n")
    path.unlink()
    assert tail.poll(0).run.status == "incomplete"
    assert tail.poll(0).broken == "rank 5 ran out of memory"
    states = follow(
        tail.poll,
        ended,
        1.0,
        sleep=lambda _: pytest.fail("waits for a trial that broke"),
    )
    assert len(list(states)) == 1


def test_a_log_that_is_gone_is_a_one_line_error(tmp_path, writer, capsys):
    path = writer().drop("run_stop").write(tmp_path / "result_0.txt")
    tail = LogTail(path)
    tail.poll(0)
    path.unlink()
    with pytest.raises(ReviewError, match="is gone"):
        tail.poll(0)
    runs = Runs([writer().drop("run_stop").write(path)])
    assert [*runs.poll(0)] == [path]
    path.unlink()
    with pytest.raises(ReviewError, match="is gone"):
        runs.poll(0)
    assert main(["watch", str(path)]) == 2
    assert main(["watch", "--once", str(tmp_path)]) == 2
    assert main(["watch", "--interval", "0", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_the_trial_under_way_is_found_before_finished_ones(tmp_path, writer):
    running = writer().write(tmp_path / "run" / "running_1" / "result_1.txt")
    writer().write(tmp_path / "run" / "result_0.txt")
    assert find_log(tmp_path) == running
    running.unlink()
    assert find_log(tmp_path) == tmp_path / "run" / "result_0.txt"


def test_exit_code_says_whether_the_target_was_reached(tmp_path, writer, capsys):
    path = writer().write(tmp_path / "result_0.txt")
    assert main(["watch", "--json", str(path)]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["phase"], state["samples"], state["share"]) == (
        "success",
        2_550_000,
        1.0,
    )
    writer().change("run_stop", metadata={"status": "aborted"}).write(path)
    assert main(["watch", str(path)]) == 1
    assert capsys.readouterr().out.startswith(
        "aborted, 2,550,000 samples, accuracy 0.7203 of 0.72"
    )
    writer().drop("run_stop").write(path)
    assert main(["watch", "--once", str(path)]) == 0
    assert "no new line for" in capsys.readouterr().out


@pytest.mark.parametrize("width", [30, 80, 160])
def test_every_state_can_be_drawn(width, states):
    import io

    from rich.console import Console

    for state in states:
        out = Console(file=io.StringIO(), width=width)
        out.print(render({state.path: state}, out))
        drawn = out.file.getvalue()
        assert all(len(line) <= width for line in drawn.splitlines())
        assert ("RCP margin" in drawn) == (state.rcp_margin is not None)


def test_the_target_of_an_open_run_is_that_of_its_configuration(tmp_path, writer):
    path = writer(division="open").write(tmp_path / "result_0.txt")
    (tmp_path / "config.json").write_text('{"evaluate": {"target": 0.1}}')
    assert LogTail(path).poll(0).target == 0.1


def test_durations_are_for_people():
    assert [duration(x) for x in (0, 59.6, 61, 3723)] == [
        "0:00",
        "1:00",
        "1:01",
        "1:02:03",
    ]


def test_a_growing_log_ends_as_the_whole_one(tmp_path, writer):
    lines = writer().lines
    grower = Grower(tmp_path / "result_0.txt", lines, step=10)
    tail = LogTail(grower.path)
    grower.now = lines[0]["time_ms"]
    states = list(follow(tail.poll, ended, 1.0, grower.clock, grower.sleep))
    assert [event.line for event in states[-1].run.log.events] == list(
        range(1, len(lines) + 1)
    )
    assert states[-1].run.log.events == Run(read_log(grower.path)).log.events


def test_a_log_written_anew_is_read_from_its_start(tmp_path, writer):
    path = writer(seed=1).write(tmp_path / "result_0.txt")
    tail = LogTail(path)
    assert tail.poll(1.75e9).run.seeds == [1]
    path.unlink()
    writer(seed=2, evaluations=18).write(path)
    assert tail.poll(1.75e9).run.seeds == [2]
    writer(seed=3, evaluations=2).write(path)  # shorter, in the same file
    assert tail.poll(1.75e9).run.seeds == [3]


def test_watch_waits_for_the_first_log(tmp_path, writer, capsys):
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            writer().write(tmp_path / "running_0" / "result_0.txt")

    assert wait_for_log(tmp_path, 0.5, sleep) == tmp_path / "running_0" / "result_0.txt"
    assert naps == [0.5] * 3
    assert capsys.readouterr().err.count("waiting for the first result_*.txt") == 1
    with pytest.raises(ReviewError, match="no such file or folder"):
        wait_for_log(tmp_path / "none", 0.5, sleep)
    (tmp_path / "empty").mkdir()
    assert main(["watch", "--once", str(tmp_path / "empty")]) == 2


def test_a_stalled_run_has_no_time_to_go(tmp_path, writer):
    log = writer()
    log.lines = log.lines[: len(log.lines) * 2 // 3]
    run = Run(read_log(log.write(tmp_path / "result_0.txt")))
    now = log.lines[-1]["time_ms"]
    assert RunState(single(run), now).eta is not None
    stalled = RunState(single(run), now + 200_000)
    assert stalled.stalled
    assert stalled.eta is None
    assert "to go" not in " ".join(stalled.parts())


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0:00"), (59.6, "1:00"), (119.5, "2:00"), (3599.7, "1:00:00")],
)
def test_times_are_rounded_and_not_cut(seconds, shown):
    assert duration(seconds) == shown
