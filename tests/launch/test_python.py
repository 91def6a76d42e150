"""One rule says which Python runs; a shell that cannot read env.sh or a config says so in one line."""

import shutil
from pathlib import Path

import pytest

from .captured import captured

LINE = "REPO_DIR=$PWD; source launch/run/python.sh; python::choose; echo $PYTHON"


def chosen(folder: Path, has_torch: set[str], there: set[str], **env: str) -> str:
    """What the rule chooses where these interpreters are there, and these have PyTorch."""
    places = {"active": "bin/python", "venv": ".venv/bin/python", "3": "bin/python3"}
    for name in there:
        path = folder / places[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\nexit {int(name not in has_torch)}\n")
        path.chmod(0o755)
    environ = {"PATH": str(folder / "bin")} | env
    done = captured(["/bin/bash", "-euc", LINE], 0, cwd=folder, env=environ)
    return done.stdout.strip().replace(f"{folder}/", "")


ALL = {"active", "venv", "3"}


@pytest.mark.parametrize(
    ("has_torch", "there", "env", "python"),
    [
        (ALL, ALL, {"PYTHON": "mine"}, "mine"),
        (ALL, ALL, {}, "python"),
        ({"venv"}, ALL, {}, ".venv/bin/python"),
        (set(), {"active", "3"}, {}, "python"),
        (set(), {"3"}, {}, "python3"),
        ({"venv"}, ALL, {"CONT": "image"}, "python"),
        ({"venv"}, ALL, {"CONT": "image", "CONTAINER_RUNTIME": "none"}, ".venv/bin/python"),
    ],
)  # fmt: skip
def test_the_rule(repository, tmp_path, has_torch, there, env, python):
    (tmp_path / "launch" / "run").mkdir(parents=True)
    shutil.copy(repository / "launch/run/python.sh", tmp_path / "launch/run")
    assert chosen(tmp_path, has_torch, there, **env) == python


def test_every_script_that_starts_python_follows_it(repository):
    """No other file chooses .venv; demos get theirs from make."""
    others = {"run/python.sh", "tools/demo_begin.sh", "tools/setup_venv.sh"}
    others = {f"launch/{name}" for name in others}
    other_lines = ("for python in", "make setup")  # of the check of names, advice
    for pattern in ("*.sh", "*.sub", "launch/**/*.sh", "input_preprocessing/*.sh"):
        for path in repository.glob(pattern):
            lines = path.read_text().splitlines()[2:]
            found = [line for line in lines if ".venv/bin/python" in line]
            found = [one for one in found if not any(word in one for word in other_lines)]  # fmt: skip
            assert not found or str(path.relative_to(repository)) in others, found


SHELLS = {"zsh": ["zsh"], "dash": ["dash"], "bash as sh": ["bash", "--posix"]}


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
@pytest.mark.parametrize("file", ["env.sh", "configs/config_DGXH100_8x8x36x1_pack.sh", "configs/pretrain_demo.sh"])  # fmt: skip
def test_another_shell_gets_one_line_and_no_exports(repository, shell, file):
    if shutil.which(shell[0]) is None:
        pytest.skip(f"no {shell[0]} here: apt-get install {shell[0]}")
    script = f". ./{file}; echo status $?; env -u PWD -u OLDPWD -u SHLVL -u _ -u HOME -u LOGNAME"
    where = {"cwd": repository, "env": {"PATH": "/usr/bin:/bin"}}
    done = captured([*shell, "-c", script], **where)
    assert done.stdout.splitlines() == ["status 2", "PATH=/usr/bin:/bin"]
    assert done.stderr.count("\n") == 1
    assert "is for bash" in done.stderr


def test_every_config_and_env_sh_tell_other_shells(repository):
    guard = 'if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo '
    begins = 'source "$(dirname -- "${BASH_SOURCE[0]}")/'
    for path in (repository / "env.sh", *(repository / "configs").glob("*.sh")):
        text = path.read_text()
        if f"{begins}begin.sh" in text or path.name == "env.sh":
            assert text.index(guard) < text.index(begins), path
