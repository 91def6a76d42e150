"""`watch` on several runs: one row each, until all have ended."""

from __future__ import annotations

import io
import json
import shutil

import pytest

from review.__main__ import main
from review.watch import Runs, follow, render


def partial(writer, path, evaluations, **options):
    """A log that has come so far."""
    log = writer(**options)
    found = [i for i, line in enumerate(log.lines) if line["key"] == "eval_accuracy"]
    log.lines = log.lines[: found[evaluations - 1] + 1]
    return log.write(path)


@pytest.fixture
def three(tmp_path, writer):
    """A finished run, one that missed the target, and one under way."""
    writer(seed=1).write(tmp_path / "lr1" / "result_0.txt")
    missed = writer(seed=2, target=0.7)
    missed.change("run_stop", metadata={"status": "aborted"})
    missed.write(tmp_path / "lr2" / "result_0.txt")
    partial(writer, tmp_path / "lr3" / "running_0" / "result_0.txt", 9, seed=3)
    return tmp_path


def test_every_run_below_is_a_line_and_a_missed_target_an_exit_status(three, capsys):
    assert main(["watch", str(three), "--all", "--once"]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(": ") for line in lines]
    phases = [row[1].split(",")[0] for row in rows]
    assert phases == ["success", "aborted", "training"]
    folders = [row[0].split("/")[-2] for row in rows]
    assert folders == ["lr1", "lr2", "running_0"]
    two = [str(three / name) for name in ("lr1", "lr3")]
    assert main(["watch", *two, "--once", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["phase"] for one in found] == ["success", "training"]


def test_runs_that_appear_and_move_are_followed_until_none_has_begun_for_a_minute(
    tmp_path, writer
):
    now = [1_750_000_200.0]
    runs = Runs([tmp_path], "5.0.0")
    seen = []

    def sleep(seconds):
        now[0] += seconds
        step = len(seen)
        if step == 1:
            partial(writer, tmp_path / "running_0" / "result_0.txt", 3, seed=1)
        if step == 2:
            (tmp_path / "running_0" / "result_0.txt").unlink()
            writer(seed=1).write(tmp_path / "result_0.txt")
        if step == 3:
            partial(writer, tmp_path / "running_1" / "result_1.txt", 3, seed=2)
        if step == 5:
            shutil.rmtree(tmp_path / "running_1")
            (tmp_path / "failed_1.txt").write_text("")
            (tmp_path / "error_1.txt").write_text("out of memory")

    for found in follow(runs, 10.0, lambda: now[0], sleep):
        states = found.values()
        seen.append([(one.path.name, one.phase, one.failure) for one in states])
        assert len(seen) < 30
    assert seen[0] == []
    assert seen[1] == [("result_0.txt", "training", None)]
    assert seen[2] == [("result_0.txt", "success", None)]
    assert [name for name, _, _ in seen[3]] == ["result_0.txt", "result_1.txt"]
    broken = "failed_1.txt", "starting", "out of memory"
    assert seen[5] == [broken, ("result_0.txt", "success", None)]
    assert len(seen) == 12  # the last ended at the sixth look, a minute before the last


@pytest.mark.parametrize("width", [50, 80, 140])
def test_the_runs_are_drawn_at_every_width(width, three):
    from rich.console import Console

    out = io.StringIO()
    screen = Console(file=out, width=width, height=40)
    screen.print(render(Runs([three], "5.0.0").poll(1_750_000_300.0), screen))
    shown = out.getvalue()
    names = ("lr1/result_0.txt", "lr2/result_0.txt", "running_0/result_0.txt")
    assert all(name[: 13 if width < 80 else None] in shown for name in names)
    assert max(len(line) for line in shown.splitlines()) <= width


def test_a_path_that_does_not_exist_is_a_one_line_error(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
