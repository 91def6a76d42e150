"""The Dockerfile is really built, on a small base of this machine's Python, and ``--check`` runs."""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .captured import captured

pytestmark = pytest.mark.slow

BASE, IMAGE = "bert-test-base", "bert-test-image"
PROGRAMS = (
    "bash sh env sed grep cat mktemp paste rm mkdir dirname ls uname id git ldconfig"
)
# Needed neither by the build nor by --check.
LEFT_OUT = {
    "triton", "transformers", "mypy", "pandas", "playwright", "ruff", "test", "idlelib", "ensurepip", "include",
    "__pycache__",
}  # fmt: skip
TREES = (sys.prefix, sys.base_prefix, "/usr/lib/git-core")
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
SETTINGS = {
    "SYNTH_DATA": "1", "SUBMISSION_DIVISION": "open", "DEVICE": "cpu", "BATCHSIZE": "2", "MAX_STEPS": "4",
    "LR": "0.01", "EVAL_ITER_START_SAMPLES": "100", "EVAL_ITER_SAMPLES": "100",
    "BERT_CONFIG": "/model/bert_config.json",
}  # fmt: skip
CONFIG = '{"vocab_size": 211, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 40}'


def docker(*words: str, **how) -> subprocess.CompletedProcess:
    return subprocess.run(["docker", *words], capture_output=True, check=False, **how)


def libraries(program: str) -> set[str]:
    """A program and its shared libraries."""
    said = captured(["ldd", program]).stdout
    return {program, *re.findall(r"(/\S+) \(0x", said)}


def in_tree(file: Path) -> bool:
    """Whether the file is copied with its folder, so that links into it are valid."""
    return any(file.is_relative_to(folder) for folder in TREES)


def files_of_base() -> Iterator[Path]:
    """Programs with their libraries, and this Python with its packages, all at their own paths."""
    found = [path for name in PROGRAMS.split() if (path := shutil.which(name))]
    found += map(str, Path(sys.base_prefix, "lib").rglob("lib-dynload/*.so"))
    found += map(str, Path(torch.__file__).parent.glob("lib/*.so*"))
    found.append(os.path.realpath(sys.executable))
    yield from map(Path, sorted(set().union(*map(libraries, found))))
    for folder in dict.fromkeys(TREES):
        for parent, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            yield from (Path(parent, name) for name in names)
            inside = (Path(parent, name) for name in folders)
            yield from (path for path in inside if path.is_symlink())


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """A small base image; skips if docker does not run."""
    if not shutil.which("docker") or docker("version").returncode:
        pytest.skip("docker does not run here")
    path = f"{sys.prefix}/bin:{sys.base_prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    command = ["docker", "import", "--change", f"ENV PATH={path}", "-", BASE]
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, **how) as importing:
        with tarfile.open(fileobj=importing.stdin, mode="w|") as tar:
            for name, target in LINKS.items():
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, target
                tar.addfile(link)
            folder = tarfile.TarInfo("tmp")
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(folder)
            tar.addfile(tarfile.TarInfo("etc/passwd"), io.BytesIO())
            seen: set[str] = set()
            for file in files_of_base():
                name = re.sub(r"^/(bin|sbin|lib|lib64)/", r"/usr/\1/", str(file))
                if name not in seen:
                    real = file if in_tree(file) else file.resolve()
                    tar.add(real, arcname=name, recursive=False)
                seen.add(name)
        importing.stdin.close()
    assert importing.returncode == 0
    yield BASE
    docker("image", "rm", "--force", IMAGE, BASE)


def test_the_image_is_built_and_checks_a_run(base, repository, tmp_path):
    # All of image.txt is in the base, which keeps its versions.
    arguments = ("--build-arg", f"BASE={base}", "--build-arg", "PIP_NO_INDEX=1")
    line = ("build", "--network", "none", *arguments, "-t", IMAGE, str(repository))
    done = docker(*line, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (tmp_path / "bert_config.json").write_text(CONFIG)
    pairs = [("--env", f"{name}={value}") for name, value in SETTINGS.items()]
    given = [word for pair in pairs for word in pair]
    start = ("run", "--rm", "--network", "none", "--volume", f"{tmp_path}:/model:ro")
    check = (*start, *given, IMAGE, "python", "-m", "bert", "--check")
    done = docker(*check, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^global batch +\d", done.stdout, re.M), done.stdout
    where = "import bert; print(bert.__file__)"
    done = docker(*start, IMAGE, "python", "-c", where, text=True)
    # The image's own checkout.
    assert done.stdout.strip() == "/workspace/bert/implementations/bert/__init__.py"
