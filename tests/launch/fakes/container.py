"""Stands in for docker and apptainer (its first argument): runs the command here, with what the
options hand over.

Records each call as JSON. The command sees the variables that the real program would give it; its
files and RUN_DIR must lie under a path that is mounted as itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TAKE_VALUE = {
    *("--label", "--user", "--group-add", "--network", "--ipc", "--workdir", "--ulimit", "--cap-add", "--gpus"),
    *("--volume", "--device", "--env", "--entrypoint", "--bind", "--pwd"),
}  # fmt: skip
FLAGS = {"--rm", "--init", "--nv", "--no-home"}
DAEMON = "docker: Error response from daemon:"
IMAGE_ENV = {"PATH": os.environ["PATH"], "OF_THE_IMAGE": "image"}


def record(entry: dict[str, Any]) -> None:
    with open(os.environ["FAKE_CALLS"], "a", encoding="utf-8") as file:
        file.write(f"{sys.argv[1]} {json.dumps(entry)}\n")


def parse(words: list[str]) -> tuple[dict[str, list[str]], str, list[str]]:
    options: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        name = words.pop(0)
        if name not in TAKE_VALUE | FLAGS:
            sys.exit(f"unknown flag: {name}")
        options.setdefault(name, []).append("" if name in FLAGS else words.pop(0))
    return options, words[0], words[1:]


def covered(path: str, mounts: list[str]) -> bool:
    pairs = [mount.split(":")[:2] for mount in mounts]
    sources = [source for source, target in pairs if source == target]
    return any(Path(path).is_relative_to(source) for source in sources)


def refuse(options: dict[str, list[str]]) -> int:
    """Exit status and message of a daemon without GPUs or limits; 0 if it accepts."""
    if os.environ.get("NO_GPUS") and "--gpus" in options:
        print(f'{DAEMON} could not select device driver "" with capabilities: [[gpu]].')
        return 125
    if os.environ.get("NO_LIMITS") and "--ulimit" in options:
        print(
            f"{DAEMON} error setting rlimit type 8: operation not permitted: unknown."
        )
        return 126
    return 0


def inside(words: list[str]) -> int:
    options, image, command = parse(words)
    if status := refuse(options):
        return status
    record({"options": options, "image": image, "command": command})
    given = [item.partition("=") for item in options.get("--env", [])]
    if sys.argv[1] == "docker":
        environ = dict(IMAGE_ENV)
        for name, has_value, value in given:
            if has_value or name in os.environ:
                environ[name] = value if has_value else os.environ[name]
    else:
        own = {name: value for name, _, value in given}
        environ = dict(os.environ) | IMAGE_ENV | own
    mounts = options.get("--volume", []) + options.get("--bind", [])
    run_dir = environ.get("RUN_DIR")
    # A check writes nothing, and before the first trial there is no folder yet.
    needed = [run_dir] if run_dir and "--check" not in command else []
    files = [w for w in command if w.startswith("/") and Path(w).is_file()]
    for path in needed + files:
        if not covered(path, mounts):
            sys.exit(f"{path} is not mounted")
    # What the stand-ins for the trainer need, whatever the options.
    environ |= {name: os.environ[name] for name in ("REAL_PYTHON", "FAKE_CALLS")}
    folder = options.get("--workdir", options.get("--pwd", ["."]))[0]
    process = subprocess.Popen(command, env=environ, cwd=folder)
    try:
        return process.wait()
    finally:
        process.kill()


def main(words: list[str]) -> int:
    if words[0] in ("run", "exec"):
        return inside(words[1:])
    record({"words": words})
    if words[0] == "image" and os.environ.get("NO_IMAGE") == words[-1]:
        return 1
    if words[0] == "version" and os.environ.get("NO_DAEMON"):
        why = "permission denied while trying to connect to the docker daemon socket"
        print(why, file=sys.stderr)
        return 1
    if words[0] == "image" and "Env" in words[-2]:
        print("\n".join(f"{name}={value}" for name, value in IMAGE_ENV.items()))
    if words[0] == "ps":
        print(os.environ.get("LISTED", "0123abc") if "--format" in words else "0123abc")
    return 0


sys.exit(main(sys.argv[2:]))
