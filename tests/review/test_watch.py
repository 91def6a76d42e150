"""`watch` follows a log that grows, to where it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.durations import duration
from review import watch
from review.__main__ import main
from review.logs.mllog import parse, read_log
from review.logs.output import ReviewError
from review.results.folder import run_folder
from review.results.run import run_of
from review.results.run_state import RunState
from review.watch import Runs, follow, read_run, render, state_of


class Grower:
    """A log that grows by ``step`` lines whenever the watcher sleeps, and the clock of the run that
    writes it.
    """

    def __init__(self, path, lines, step=1):
        self.path, self.lines, self.step = path, lines, step
        self.written, self.now = 0, 0.0
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


def watched(grower):
    """The run's state at every look."""
    looks = follow(Runs([grower.path]), 1.0, grower.clock, grower.sleep)
    return [state for states in looks for state in states.values()]


@pytest.fixture
def states(tmp_path, writer):
    """Every state of a run of 17 evaluations, seen line by line."""
    grower = Grower(tmp_path / "result_0.txt", writer().lines)
    grower.now = grower.lines[0]["time_ms"]
    return watched(grower)


def test_a_growing_log_goes_through_the_phases_to_its_end(states):
    phases = dict.fromkeys(state.phase for state in states)
    expected = "starting initialising training evaluating finishing success"
    assert " ".join(phases) == expected
    assert [state.ended for state in states] == [False] * (len(states) - 1) + [True]
    counts = [len(state.run.evaluations) for state in states]
    assert counts == sorted(counts)
    assert counts[-1] == 17


def test_samples_never_go_back_and_end_at_all_of_them(states):
    samples = [state.samples for state in states if state.samples is not None]
    assert samples == sorted(samples)
    assert samples[-1] == 17 * 150_000
    assert states[-1].limit is None, "no config.json says it"


@pytest.mark.parametrize(("settings", "limit"), [
    ({"schedule": {"max_steps": 3680}, "max_samples": 2_500_000}, 2_500_000),
    ({"schedule": {"max_steps": 2000}, "max_samples": 2_500_000}, 2000 * 768),
    ({"schedule": {"max_steps": 3680}, "max_samples": 0}, 3680 * 768),
    ({"schedule": 1, "max_samples": "many"}, None),
])  # fmt: skip
def test_the_limit_is_the_earlier_of_steps_and_samples(
    settings, limit, tmp_path, writer
):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    log = writer()
    log.lines = log.lines[: len(log.lines) // 2]
    state = state_of(read_run(log.write(tmp_path / "result_0.txt")), 0)
    assert state.limit == limit
    said = f" of at most {limit or 0:,.0f} samples"
    assert (said in ", ".join(state.parts())) == (limit is not None)
    assert state.as_dict()["limit_samples"] == limit


def test_an_acceptance_test_is_no_run_and_says_where_to_look(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"burn_in_seconds": 0}')
    for options in ([], ["--once"], ["--all"]):
        assert main(["watch", str(tmp_path), *options]) == 2
        assert f"review certify {tmp_path}" in capsys.readouterr().err


def test_a_run_without_a_target_is_watched_to_its_last_step_and_nothing_of_the_benchmark_is_mentioned(
    tmp_path, writer, capsys
):
    settings = {"evaluate": {"target": 0.0, "every_samples": 9}}
    settings["schedule"] = {"max_steps": 20_000}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    lines = writer().lines
    at = [i for i, line in enumerate(lines) if line["key"] == "eval_stop"][2] + 1
    path = tmp_path / "result_0.txt"
    path.write_text("".join(f":::MLLOG {json.dumps(line)}\n" for line in lines[:at]))
    state = state_of(read_run(path), lines[at - 1]["time_ms"] / 1000)
    end = 20_000 * state.run.batch_size
    assert (state.phase, state.samples, state.limit) == ("training", 450_000, end)
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
    behind = RunState(single(run), now - 5_000)
    assert behind.samples == 150_000


def written(lines):
    text = "".join(f":::MLLOG {json.dumps(line)}\n" for line in lines)
    return run_of(parse(Path("result_0.txt"), text.encode()))


def single(run):
    return run_folder(run.path.parent, (run,))


def test_half_written_lines_are_left_for_the_next_look(tmp_path, writer):
    path = writer().write(tmp_path / "result_0.txt")
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    standing = state_of(read_run(path), 0)
    assert not standing.ended
    assert not standing.run.log.errors
    path.write_bytes(data)
    assert state_of(read_run(path), 0).ended


def test_the_log_is_followed_to_where_the_launcher_moves_it(tmp_path, writer):
    path = writer().drop("run_stop").write(tmp_path / "running_3" / "result_3.txt")
    end = tmp_path / "result_3.txt"
    file, folder = Runs([path]), Runs([tmp_path])
    assert [run.poll(0)[end].ended for run in (file, folder)] == [False] * 2
    (tmp_path / "failed_3.txt").write_bytes(path.read_bytes())
    (tmp_path / "error_3.txt").write_text("rank 5 ran out of memory\n")
    path.unlink()
    for run in (file, folder):
        (state,) = run.poll(0).items()
        assert (state[0], state[1].run.status) == (end, "incomplete")
        assert state[1].failure == "rank 5 ran out of memory"
    no_sleep = lambda _: pytest.fail("waits for a trial that broke")  # noqa: E731
    looks = follow(Runs([tmp_path / "failed_3.txt"]), 1.0, sleep=no_sleep)
    assert len(list(looks)) == 1


def test_a_log_that_is_gone_is_a_one_line_error(tmp_path, writer, capsys):
    path = writer().drop("run_stop").write(tmp_path / "result_0.txt")
    runs = Runs([path])
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
    finished = writer().write(tmp_path / "run" / "result_0.txt")
    for path in (running, finished):
        (state,) = Runs([tmp_path], newest=True).poll(0).values()
        assert state.path == path
        running.unlink(missing_ok=True)


def test_exit_code_says_whether_the_target_was_reached(tmp_path, writer, capsys):
    path = writer().write(tmp_path / "result_0.txt")
    assert main(["watch", "--json", str(path)]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["phase"], state["samples"]) == ("success", 2_550_000)
    writer().change("run_stop", metadata={"status": "aborted"}).write(path)
    assert main(["watch", str(path)]) == 1
    ended = "aborted, 2,550,000 samples, accuracy 0.7196, 0.7199, 0.7203 of 0.72"
    assert capsys.readouterr().out.startswith(ended)
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
        assert state.phase in drawn


def test_the_target_of_an_open_run_is_that_of_its_configuration(tmp_path, writer):
    path = writer(division="open").write(tmp_path / "result_0.txt")
    (tmp_path / "config.json").write_text('{"evaluate": {"target": 0.1}}')
    assert state_of(read_run(path), 0).target == 0.1


def test_a_growing_log_ends_as_the_whole_one(tmp_path, writer):
    lines = writer().lines
    grower = Grower(tmp_path / "result_0.txt", lines, step=10)
    grower.now = lines[0]["time_ms"]
    states = watched(grower)
    events = states[-1].run.log.events
    assert [event.line for event in events] == list(range(1, len(lines) + 1))
    assert events == read_log(grower.path).events


def test_a_log_written_anew_is_read_from_its_start(tmp_path, writer):
    path = writer(seed=1).write(tmp_path / "result_0.txt")
    runs = Runs([path])
    assert runs.poll(1.75e9)[path].run.seeds == [1]
    path.unlink()
    writer(seed=2, evaluations=18).write(path)
    assert runs.poll(1.75e9)[path].run.seeds == [2]
    writer(seed=3, evaluations=2).write(path)  # shorter, in the same file
    assert runs.poll(1.75e9)[path].run.seeds == [3]


def test_a_log_that_stands_still_is_read_once(tmp_path, writer, monkeypatch):
    path, read = writer().write(tmp_path / "result_0.txt"), []
    noted = lambda path, ruleset: read.append(path) or read_run(path)  # noqa: E731
    monkeypatch.setattr(watch, "read_run", noted)
    runs = Runs([tmp_path])
    for _ in range(3):
        runs.poll(1.75e9)
    assert read == [path]


def test_watch_waits_for_the_first_log(tmp_path, writer, capsys, monkeypatch):
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            writer().write(tmp_path / "running_0" / "result_0.txt")

    monkeypatch.setattr(follow, "__defaults__", (lambda: 1.75e9, sleep))
    assert main(["watch", "--interval", "0.5", str(tmp_path)]) == 0
    assert naps == [0.5] * 3
    assert capsys.readouterr().err.count("waiting for the first result_*.txt") == 1
    (tmp_path / "empty").mkdir()
    for place in ("none", "empty"):
        assert main(["watch", "--once", str(tmp_path / place)]) == 2


@pytest.mark.parametrize(("seconds", "shown"), [
    (0.4, "0:00"),
    (59.6, "1:00"),
    (61, "1:01"),
    (3599.7, "1:00:00"),
    (3723, "1:02:03"),
])  # fmt: skip
def test_times_are_rounded_and_not_cut(seconds, shown):
    assert duration(seconds) == shown
