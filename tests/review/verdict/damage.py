"""Ways to break a submission, and the official verdict on what is left."""

import contextlib
import json
import os
import random
import shutil
import warnings
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from mlperf_logging.package_checker import package_checker

from ..conftest import OWN, events_of, quiet_tools, write_submission

LARGE = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    "vocab_size": 30522,
}  # fmt: skip
RECORD = {  # config.json of a run of the benchmark
    "model": LARGE,
    "data": {"max_seq_length": 512, "synthetic": False},
    "evaluate": {"target": 0.72, "every_samples": 150_000},
    "mlperf": {"division": "closed"},
}
# What may be there instead of a record: nothing, a folder, a link, or what records nothing.
WITHOUT = (None, "folder", "link", "{}", "[]", '{"model": "x", "mlperf": "y"}')


def record(folder, **sections):
    """Writes the record of a run of the benchmark, with other sections."""
    (folder / "config.json").write_text(json.dumps({**RECORD, **sections}))


def own(folder, **sections):
    """Makes the logs those of a run of ours, with its record."""
    write_submission(folder.parents[2], file=OWN)
    record(folder, **sections)


def take_record(path, instead):
    path.unlink(missing_ok=True)
    if instead == "folder":
        path.mkdir()
    elif instead == "link":
        path.symlink_to("nowhere")
    elif instead is not None:
        path.write_text(instead)


def duplicate(source: Path, target: Path) -> Path:
    """Copies a tree without its permissions, since published results may be read-only."""
    for path in source.rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return target


def official(organization: Path) -> bool:
    """The package checker's verdict on a copy, without any of this project's code; a crash is a failure."""
    pipes = {path.name for path in organization.rglob("*") if path.is_fifo()}
    if any(name.startswith(("result_", "package_", "dgx")) for name in pipes):
        return False  # it would wait for their writers
    options = ("training", "5.0.0", False, False, False, False, False, "")
    with contextlib.ExitStack() as stack:
        copy = Path(stack.enter_context(TemporaryDirectory())) / organization.name
        ignore = lambda _, names: pipes & {*names}  # noqa: E731
        shutil.copytree(organization, copy, symlinks=True, ignore=ignore)
        stack.enter_context(quiet_tools())
        said = stack.enter_context(mock.patch("logging.info"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):
            package_checker.check_training_package(str(copy), *options)
    return "FOUND NO ERRORS" in str(said.mock_calls)


def edit(folder, *names, change):
    """Changes the events of the named logs; ``change`` gets the list of them."""
    for path in [folder / f"result_{name}.txt" for name in names]:
        events = events_of(path)
        change(events)
        path.write_text("".join(f":::MLLOG {json.dumps(event)}\n" for event in events))


ALL = tuple(range(10))


def of_logs(*names):
    """Makes a change of events one of the named logs of a folder, or of all."""
    return lambda change: lambda folder: edit(folder, *(names or ALL), change=change)


def drop(key, *names):
    @of_logs(*names)
    def mutate(events):
        events[:] = [event for event in events if event["key"] != key]

    return mutate


def put(key, *names, **fields):
    return of_key(key, *names, how=lambda event: fields)


def of_key(key, *names, how):
    """Changes the events of a key, or all, in the named logs, or all."""

    @of_logs(*names)
    def mutate(events):
        for event in events:
            if key in (None, event["key"]):
                event.update(how(event))

    return mutate


def scale_samples(factor):
    @of_logs()
    def mutate(events):
        for about in (event["metadata"] for event in events):
            if "epoch_num" in about:
                about["epoch_num"] = int(about["epoch_num"] * factor)

    return mutate


def shift(key, seconds, *names):
    def how(event):
        return {"time_ms": event["time_ms"] + 1000 * seconds}

    return of_key(key, *(names or (4,)), how=how)


def first_of(events, key):
    return next(i for i, event in enumerate(events) if event["key"] == key)


def insert(key, make, *names):
    """Puts events before the first of a key, of which they are made."""

    @of_logs(*names)
    def mutate(events):
        at = first_of(events, key)
        events[at:at] = make(events[at])

    return mutate


def initial(accuracy):
    def evaluation(start):
        about = start["metadata"] | {"epoch_num": 0}
        made = {"key": "eval_accuracy", "event_type": "POINT_IN_TIME"}
        return [start | made | {"value": accuracy, "metadata": about}]

    return insert("eval_start", evaluation, 2)


@of_logs()
def go_on(events):
    """One more evaluation behind the last."""
    at = len(events) - first_of(events[::-1], "eval_accuracy")
    about = events[at - 1]["metadata"]
    more = {"metadata": about | {"epoch_num": about["epoch_num"] + 150_000}}
    events.insert(at, events[at - 1] | more)


def system(**fields):
    def mutate(folder):
        path = folder.parents[2] / "systems" / "dgx.json"
        content = json.loads(path.read_text()) | fields
        kept = {key: value for key, value in content.items() if value != "DROP"}
        path.write_text(json.dumps(kept, indent=1))

    return mutate


def rewrite(name, text):
    return lambda folder: (folder / name).write_text(text)


def remove(*names):
    return lambda folder: [(folder / f"result_{name}.txt").unlink() for name in names]


def rename(folder):
    folder.rename(folder.with_name("Bert"))


def crop(folder):
    path = folder / "result_7.txt"
    path.write_bytes(path.read_bytes()[:-300])


def copy_log(folder):
    shutil.copy(folder / "result_1.txt", folder / "result_3.txt")


def log_also(key, value):
    """Logs another event, right before init_stop."""
    return insert("init_stop", lambda stop: [stop | {"key": key, "value": value}])


def move(key, behind):
    """Puts an event right behind another, with its time."""

    @of_logs()
    def mutate(events):
        moved = events.pop(first_of(events, key))
        at = first_of(events, behind)
        events.insert(at + 1, moved | {"time_ms": events[at]["time_ms"]})

    return mutate


def clock(change_time):
    return of_key(None, how=lambda event: {"time_ms": change_time(event["time_ms"])})


def copy_with_another_clock(folder):
    """The log of another run, a day later and with another seed."""
    copy_log(folder)
    put("seed", 3, value=4711)(folder)
    shift(None, 86_400, 3)(folder)


def cut(lines):
    @of_logs(7)
    def mutate(events):
        del events[lines:]

    return mutate


def glue(folder):
    path = folder / "result_6.txt"
    text = path.read_text()
    at = text.index("\n", text.index('"tracked_stats"'))
    path.write_text(text[:at] + text[at + 1 :])


def ranks(count):
    """So many ranks log init_start."""
    return insert("init_start", lambda start: [start] * (count - 1))


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


VALUES = [None, True, 0, 1, -1, 768, 896, "768", "closed", "open", "bert", "resnet"]
VALUES += [{}, [], 0.72, 0.7, 1e9, "", 42]


def damage(folder, choose):
    """Changes events of one, two or all logs at random; may cut one off."""
    for _ in range(choose.choice([1, 1, 2, 3])):
        some = [[choose.randrange(10)], choose.sample(range(10), 2), ALL]
        names, seed = choose.choice(some), choose.random()
        # The same change in each of the logs.
        edit(folder, *names, change=partial(_change, seed))
    if choose.random() < 0.2:
        path = folder / f"result_{choose.randrange(10)}.txt"
        content = path.read_bytes()
        path.write_bytes(content[: choose.randrange(len(content))])


def _change(seed, events):
    same = random.Random(seed)
    event, kind, value = same.choice(events), same.randrange(6), same.choice(VALUES)
    alike = [one for one in events if one["key"] == event["key"]]
    for one in alike if same.random() < 0.5 else [event]:
        if kind == 0:
            events.remove(one)
        elif kind == 1:
            one["value"] = value
        elif kind == 2:
            about = [{}, None, {"epoch_num": value}, {"status": "aborted"}]
            one["metadata"] = same.choice(about)
        elif kind == 3:
            events.insert(same.randrange(len(events)), one | {"value": value})
        elif kind == 4:
            now = one["time_ms"]
            one["time_ms"] = same.choice([0, now + 3_000_000, now - 100_000, value])
        else:
            one["key"] = same.choice(events)["key"]


NAMES = (
    "power", "power/result_0", "power/result_1/node_0.txt", "power/result_2/node_x.txt", "power/result_3/sw_9.txt",
    "result_3.txt", "result_10.txt", "result_.txt", "package_checker_params", "../package_checker_params",
    "scaling.json", "../../again", "../again", "../../other/bert", "../../../systems/dgx.json",
    "../../../systems/other.json", "../../../benchmarks/bert",
)  # fmt: skip
CONTENTS = (b"", b"rcp-bypass", b"\xff\xfe", b"{}", b"[]", b"NaN")
CONTENTS += (b'{"scaling_factor": NaN}', b'{"division": "closed"}')
TARGETS = ("..", "nowhere", "/dev/null", "result_0.txt", ".")


def misplace(folder, choose):
    """Puts a file, folder, link or pipe where another is, or none, once or twice."""
    for _ in range(choose.choice([1, 2])):
        path, kind = folder / choose.choice(NAMES), choose.randrange(6)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            if kind == 0:
                path.mkdir()
            elif kind == 1:
                path.symlink_to(choose.choice([*TARGETS, path.name]))
            elif kind == 2 and path.suffix != ".json":
                os.mkfifo(path)
            elif kind == 3:
                (path / choose.choice(["bert", "x.txt"])).mkdir(parents=True)
            else:
                path.write_bytes(choose.choice(CONTENTS))
        except OSError:
            continue  # what the first one put there
