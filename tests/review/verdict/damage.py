"""Ways to break a submission, and the official verdict on what is left."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import warnings
from functools import partial
from pathlib import Path


def duplicate(source: Path, target: Path) -> Path:
    """Copies a tree without its permissions, since published results may be read-only."""
    for path in source.rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return target


def official(organization: Path) -> bool:
    """The package checker's verdict on a copy, without any of this project's code; a crash is a
    failure.
    """
    import yaml
    from mlperf_logging.compliance_checker import mlp_compliance
    from mlperf_logging.package_checker import package_checker

    copy = organization.parent / "official" / organization.name
    pipes = [path.name for path in organization.rglob("*") if path.is_fifo()]
    shutil.copytree(
        organization,
        copy,
        symlinks=True,
        ignore=lambda _, names: [name for name in names if name in pipes],
    )
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    root, loader = logging.getLogger(), yaml.BaseLoader
    level, handlers = root.level, root.handlers[:]
    mlp_compliance.enqueued_configs.clear()
    yaml.BaseLoader = getattr(yaml, "CBaseLoader", loader)  # same, but faster
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package_checker.check_training_package(
                str(copy), "training", "5.0.0", False, False, False, False, False, ""
            )
    except Exception:
        return False
    finally:
        yaml.BaseLoader = loader
        root.setLevel(level)
        root.handlers[:] = handlers
        shutil.rmtree(copy)
    return any("FOUND NO ERRORS" in message for message in said)


def edit(folder, *names, change):
    """Changes the events of the named logs; ``change`` gets the list of them."""
    for path in [folder / f"result_{name}.txt" for name in names]:
        lines = [line for line in path.read_text().splitlines() if ":::MLLOG " in line]
        events = [json.loads(line.split(":::MLLOG ")[1]) for line in lines]
        change(events)
        path.write_text("".join(f":::MLLOG {json.dumps(event)}\n" for event in events))


ALL = tuple(range(10))


def drop(key, *names):
    def mutate(folder):
        def change(events):
            events[:] = [event for event in events if event["key"] != key]

        edit(folder, *(names or ALL), change=change)

    return mutate


def put(key, *names, **fields):
    return of_key(key, *names, how=lambda event: fields)


def of_key(key, *names, how):
    """Changes the events of a key in the named logs, or all."""

    def change(events):
        for event in events:
            if event["key"] == key:
                event.update(how(event))

    return lambda folder: edit(folder, *(names or ALL), change=change)


def scale_samples(factor):
    def change(events):
        for event in events:
            if "epoch_num" in event["metadata"]:
                event["metadata"]["epoch_num"] = int(
                    event["metadata"]["epoch_num"] * factor
                )

    return lambda folder: edit(folder, *ALL, change=change)


def shift(key, seconds, *names):
    later = 1000 * seconds
    names = names or (4,)
    return of_key(key, *names, how=lambda event: {"time_ms": event["time_ms"] + later})


def initial(accuracy):
    def change(events):
        keys = [event["key"] for event in events]
        first = events[keys.index("eval_accuracy")]
        at = keys.index("eval_start")
        made = {"value": accuracy, "time_ms": events[at]["time_ms"]}
        about = {"metadata": first["metadata"] | {"epoch_num": 0}}
        events.insert(at, first | made | about)

    return lambda folder: edit(folder, 2, change=change)


def go_on(events):
    last = max(i for i, event in enumerate(events) if event["key"] == "eval_accuracy")
    metadata = events[last]["metadata"] | {
        "epoch_num": events[last]["metadata"]["epoch_num"] + 150_000
    }
    events.insert(last + 1, events[last] | {"metadata": metadata})


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

    def change(events):
        at = next(i for i, event in enumerate(events) if event["key"] == "init_stop")
        events.insert(at, events[at] | {"key": key, "value": value})

    return lambda folder: edit(folder, *ALL, change=change)


def move(key, behind):
    """Puts an event right behind another, with its time."""

    def change(events):
        moved = next(event for event in events if event["key"] == key)
        events.remove(moved)
        at = next(i for i, event in enumerate(events) if event["key"] == behind)
        events.insert(at + 1, moved | {"time_ms": events[at]["time_ms"]})

    return lambda folder: edit(folder, *ALL, change=change)


def clock(change_time):
    """Changes every time of every log."""

    def change(events):
        for event in events:
            event["time_ms"] = change_time(event["time_ms"])

    return lambda folder: edit(folder, *ALL, change=change)


def copy_with_another_clock(folder):
    """The log of another run, a day later and with another seed."""
    copy_log(folder)

    def change(events):
        for event in events:
            event["time_ms"] += 86_400_000
            event["value"] = 4711 if event["key"] == "seed" else event["value"]

    edit(folder, 3, change=change)


def cut(lines):
    """Cuts one log to its first lines."""

    def mutate(folder):
        path = folder / "result_7.txt"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))

    return mutate


def glue(folder):
    """Two events on one line of one log."""
    path = folder / "result_6.txt"
    text = path.read_text()
    at = text.index("\n", text.index('"tracked_stats"'))
    path.write_text(text[:at] + text[at + 1 :])


def ranks(count):
    """So many ranks log init_start."""

    def change(events):
        start = next(event for event in events if event["key"] == "init_start")
        at = events.index(start)
        events[at:at] = [start] * (count - 1)

    return lambda folder: edit(folder, *ALL, change=change)


def both(*changes):
    """One after the other."""

    def mutate(folder):
        for one in changes:
            one(folder)

    return mutate


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
                path.symlink_to(
                    choose.choice(
                        ["..", "nowhere", path.name, "/dev/null", "result_0.txt", "."]
                    )
                )
            elif kind == 2 and path.suffix != ".json":
                os.mkfifo(path)
            elif kind == 3:
                (path / choose.choice(["bert", "x.txt"])).mkdir(parents=True)
            else:
                path.write_bytes(choose.choice(CONTENTS))
        except OSError:  # what the first one put there
            pass
