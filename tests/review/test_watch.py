"""`watch` follows logs that grow, to where they end: one, or several with a row each."""

import io
import json
import shutil

import pytest
from rich.console import Console

from common.durations import duration
from review import watch
from review.logs.mllog import read_log
from review.logs.output import ReviewError
from review.watch import Runs, follow, read_run, render, state_of

from .conftest import LogWriter


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Every state of a run of 17 evaluations, seen line by line."""
    path, lines = tmp_path_factory.mktemp("watch") / "result_0.txt", LogWriter().lines
    path.write_text("")
    runs, seen = Runs([path]), []
    for line in lines:
        seen.append(runs.poll(line["time_ms"] / 1000)[path])
        with open(path, "a") as file:
            file.write(f":::MLLOG {json.dumps(line)}\n")
    seen.append(runs.poll(lines[-1]["time_ms"] / 1000)[path])
    return seen


def partial(path, key="eval_accuracy", count=1, **options):
    """Writes a log that ends with so many of a key; returns the path and the time of its end."""
    log = LogWriter(**options)
    found = [i for i, line in enumerate(log.lines) if line["key"] == key]
    log.lines = log.lines[: found[count - 1] + 1]
    return log.write(path), log.lines[-1]["time_ms"] / 1000


def test_a_growing_log_goes_through_the_phases_to_its_end(states):
    phases = dict.fromkeys(state.phase for state in states)
    expected = "starting initialising training evaluating finishing success"
    assert " ".join(phases) == expected
    assert [state.ended for state in states] == [False] * (len(states) - 1) + [True]
    counts = [len(state.run.evaluations) for state in states]
    samples = [state.samples for state in states if state.samples is not None]
    assert (counts, samples) == (sorted(counts), sorted(samples))
    assert (counts[-1], samples[-1]) == (17, 17 * 150_000)
    assert states[-1].limit is None, "no config.json says it"
    assert states[-1].run.log.events == read_log(states[-1].path).events


@pytest.mark.parametrize(("settings", "limit"), [
    ({"schedule": {"max_steps": 3680}, "max_samples": 2_500_000}, 2_500_000),
    ({"schedule": {"max_steps": 2000}, "max_samples": 2_500_000}, 2000 * 768),
    ({"schedule": {"max_steps": 3680}, "max_samples": 0}, 3680 * 768),
    ({"schedule": 1, "max_samples": "many"}, None),
])  # fmt: skip
def test_the_limit_is_the_earlier_of_steps_and_samples(settings, limit, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    path, _ = partial(tmp_path / "result_0.txt", count=8)
    state = state_of(read_run(path), 0)
    assert state.limit == state.as_dict()["limit_samples"] == limit
    said = f" of at most {limit or 0:,.0f} samples"
    assert (said in ", ".join(state.parts())) == (limit is not None)


def test_an_acceptance_test_is_no_run_and_says_where_to_look(tmp_path, command):
    (tmp_path / "config.json").write_text('{"burn_in_seconds": 0}')
    for options in ([], ["--once"], ["--all"]):
        status, _, error = command("watch", tmp_path, *options)
        assert (status, f"review certify {tmp_path}" in error) == (2, True)


def test_without_a_target_nothing_of_the_benchmark_is_said(tmp_path, command):
    settings = {"evaluate": {"target": 0.0, "every_samples": 9}}
    settings["schedule"] = {"max_steps": 20_000}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    path, now = partial(tmp_path / "result_0.txt", "eval_stop", 3)
    state = state_of(read_run(path), now)
    end = 20_000 * state.run.batch_size
    assert (state.phase, state.samples, state.limit) == ("training", 450_000, end)
    said = command("watch", path, "--once").out
    assert "accuracy" in said
    assert not any(word in said for word in (" of 0.72", "RCP", "published"))
    (tmp_path / "config.json").unlink()
    assert " of 0.72" in command("watch", path, "--once").out


def test_a_silent_run_is_stalled_after_a_minute(tmp_path):
    path, end = partial(tmp_path / "result_0.txt")
    run = read_run(path)
    assert [state_of(run, end + late).stalled for late in (59, 61)] == [False, True]
    assert state_of(run, end - 5).samples == 150_000


def test_half_written_lines_are_left_for_the_next_look(tmp_path):
    path = LogWriter().write(tmp_path / "result_0.txt")
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    standing = state_of(read_run(path), 0)
    assert (standing.ended, standing.run.log.errors) == (False, ())
    path.write_bytes(data)
    assert state_of(read_run(path), 0).ended


def test_the_log_is_followed_to_where_the_launcher_moves_it(tmp_path):
    log = LogWriter().drop("run_stop")
    path, end = tmp_path / "running_3" / "result_3.txt", tmp_path / "result_3.txt"
    runs = Runs([log.write(path)]), Runs([tmp_path])
    assert [run.poll(0)[end].ended for run in runs] == [False] * 2
    log.write(tmp_path / "failed_3.txt")
    (tmp_path / "error_3.txt").write_text("rank 5 ran out of memory\n")
    path.unlink()
    for run in runs:
        ((place, state),) = run.poll(0).items()
        assert (place, state.run.status) == (end, "incomplete")
        assert state.failure == "rank 5 ran out of memory"
    no_sleep = lambda _: pytest.fail("waits for a trial that broke")  # noqa: E731
    looks = follow(Runs([tmp_path / "failed_3.txt"]), 1.0, sleep=no_sleep)
    assert len(list(looks)) == 1


def test_a_log_that_is_gone_is_a_one_line_error(tmp_path, command):
    path = LogWriter().drop("run_stop").write(tmp_path / "result_0.txt")
    runs = Runs([path])
    assert [*runs.poll(0)] == [path]
    path.unlink()
    with pytest.raises(ReviewError, match="is gone"):
        runs.poll(0)
    (tmp_path / "empty").mkdir()
    for line in ("result_0.txt", ". --once", ". --interval=0", "none --once", "a b"):
        words = [tmp_path / word if word[0] != "-" else word for word in line.split()]
        status, _, error = command("watch", *words)
        assert (status, error.count("\n")) == (2, 1), line


def test_the_trial_under_way_is_found_before_finished_ones(tmp_path):
    running = LogWriter().write(tmp_path / "run" / "running_1" / "result_1.txt")
    finished = LogWriter().write(tmp_path / "run" / "result_0.txt")
    for path in (running, finished):
        (state,) = Runs([tmp_path], newest=True).poll(0).values()
        assert state.path == path
        running.unlink(missing_ok=True)


def test_exit_code_says_whether_the_target_was_reached(tmp_path, command):
    path = LogWriter().write(tmp_path / "result_0.txt")
    state = command("watch", "--json", path).json
    assert (state["phase"], state["samples"]) == ("success", 2_550_000)
    LogWriter().change("run_stop", metadata={"status": "aborted"}).write(path)
    status, shown, _ = command("watch", path)
    ended = "aborted, 2,550,000 samples, accuracy 0.7196, 0.7199, 0.7203 of 0.72"
    assert (status, shown.startswith(ended)) == (1, True)
    LogWriter().drop("run_stop").write(path)
    status, shown, _ = command("watch", "--once", path)
    assert (status, "no new line for" in shown) == (0, True)


def test_a_log_written_anew_is_read_from_its_start(tmp_path):
    path = tmp_path / "result_0.txt"
    LogWriter(seed=1).write(path)
    runs = Runs([path])
    assert runs.poll(1.75e9)[path].run.seeds == [1]
    path.unlink()
    LogWriter(seed=2, evaluations=18).write(path)
    assert runs.poll(1.75e9)[path].run.seeds == [2]
    LogWriter(seed=3, evaluations=2).write(path)  # shorter, in the same file
    assert runs.poll(1.75e9)[path].run.seeds == [3]


def test_a_log_that_stands_still_is_read_once(tmp_path, monkeypatch):
    path, read = LogWriter().write(tmp_path / "result_0.txt"), []
    noted = lambda path, ruleset: read.append(path) or read_run(path)  # noqa: E731
    monkeypatch.setattr(watch, "read_run", noted)
    runs = Runs([tmp_path])
    for _ in range(3):
        runs.poll(1.75e9)
    assert read == [path]


def test_watch_waits_for_the_first_log(tmp_path, command, monkeypatch):
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            LogWriter().write(tmp_path / "running_0" / "result_0.txt")

    monkeypatch.setattr(follow, "__defaults__", (lambda: 1.75e9, sleep))
    status, _, error = command("watch", "--interval", "0.5", tmp_path)
    assert (status, naps) == (0, [0.5] * 3)
    assert error.count("waiting for the first result_*.txt") == 1


def test_times_are_rounded_and_not_cut():
    shown = map(duration, (0.4, 59.6, 61, 3599.7, 3723))
    assert [*shown] == ["0:00", "1:00", "1:01", "1:00:00", "1:02:03"]


@pytest.fixture
def three(tmp_path):
    """A finished run, one that missed the target, and one under way."""
    LogWriter(seed=1).write(tmp_path / "lr1" / "result_0.txt")
    missed = LogWriter(seed=2, target=0.7)
    missed.change("run_stop", metadata={"status": "aborted"})
    missed.write(tmp_path / "lr2" / "result_0.txt")
    partial(tmp_path / "lr3" / "running_0" / "result_0.txt", count=9, seed=3)
    return tmp_path


def test_every_run_below_is_a_line_and_a_missed_target_an_exit_status(three, command):
    status, shown, _ = command("watch", three, "--all", "--once")
    assert status == 1
    rows = [line.split(": ") for line in shown.splitlines()]
    found = [(row[0].split("/")[-2], row[1].split(",")[0]) for row in rows]
    assert found == [("lr1", "success"), ("lr2", "aborted"), ("running_0", "training")]
    two = [three / name for name in ("lr1", "lr3")]
    status, shown, _ = command("watch", *two, "--once", "--json")
    phases = [json.loads(line)["phase"] for line in shown.splitlines()]
    assert (status, phases) == (0, ["success", "training"])


def test_runs_are_followed_until_none_has_begun_for_a_minute(tmp_path):
    now, seen = [1_750_000_200.0], []
    first, second = (tmp_path / f"running_{n}" / f"result_{n}.txt" for n in range(2))

    def sleep(seconds):
        now[0] += seconds
        step = len(seen)
        if step == 1:
            partial(first, count=3, seed=1)
        if step == 2:
            first.unlink()
            LogWriter(seed=1).write(tmp_path / "result_0.txt")
        if step == 3:
            partial(second, count=3, seed=2)
        if step == 5:
            shutil.rmtree(second.parent)
            (tmp_path / "failed_1.txt").write_text("")
            (tmp_path / "error_1.txt").write_text("out of memory")

    for found in follow(Runs([tmp_path], "5.0.0"), 10.0, lambda: now[0], sleep):
        states = found.values()
        seen.append([(one.path.name, one.phase, one.failure) for one in states])
        assert len(seen) < 30
    ended = "result_0.txt", "success", None
    assert seen[:3] == [[], [("result_0.txt", "training", None)], [ended]]
    assert [name for name, _, _ in seen[3]] == ["result_0.txt", "result_1.txt"]
    assert seen[5] == [("failed_1.txt", "starting", "out of memory"), ended]
    assert len(seen) == 12  # the last ended at the sixth look, a minute before the last


def drawn(found, width):
    out = io.StringIO()
    screen = Console(file=out, width=width, height=40)
    screen.print(render(found, screen))
    assert all(len(line) <= width for line in out.getvalue().splitlines())
    return out.getvalue()


@pytest.mark.parametrize("width", [30, 50, 80, 160])
def test_every_state_and_several_runs_can_be_drawn(width, states, three):
    for state in states:
        assert state.phase in drawn({state.path: state}, width)
    shown = drawn(Runs([three], "5.0.0").poll(1_750_000_300.0), width)
    for name in ("lr1/result_0.txt", "lr2/result_0.txt", "running_0/result_0.txt"):
        assert width < 50 or name[: 13 if width < 80 else None] in shown
