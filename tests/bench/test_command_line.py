"""Every benchmark rejects invalid arguments in one line, before it measures anything."""

import json
import re
import subprocess
import sys

import pytest

AT_LEAST_ONE = r"'0': expected an integer of at least 1"


@pytest.fixture
def script(bench, monkeypatch, capsys):
    """script(name, *arguments) -> exit status, stdout and stderr."""

    def run(name, *arguments):
        module = bench(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            module.main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


CASES = [
    ("step_model", ("--rows", "0"), AT_LEAST_ONE),
    ("cpu_step", ("--rows", "0"), AT_LEAST_ONE),
    ("kernels", (), "the following arguments are required: kernel"),
    ("convergence", ("--steps", "30"), "--steps 30: expected a multiple of 25"),
    ("gpu_all", ("machine", "--nope"), "unrecognized arguments: --nope"),
    ("gpu_all", ("--output", __file__), "File exists"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "words"), CASES)
def test_invalid_arguments_are_one_line(script, name, arguments, words):
    status, out, err = script(name, *arguments)
    assert (status, out) == (2, "")
    assert re.fullmatch(rf"{name}\.py: error: .*; see --help\n", err)
    assert words in err


@pytest.mark.parametrize("name", ["gpu_all", "step_model"])
def test_help_is_the_docstring_and_nothing_runs(script, bench, name):
    status, out, _ = script(name, "--help")
    assert status == 0
    assert out.startswith(f"usage: {name}.py")
    assert bench(name).__doc__.splitlines()[0] in out


def test_every_benchmark_uses_this_parser(repository):
    scripts = (repository / "bench").glob("*.py")
    started = {path.name: path.read_text() for path in scripts}
    for name, text in started.items():
        if "__main__" in text:
            assert "Parser(__doc__)" in text, name
            assert not re.search(r"type=(int|float)\b", text), name
    assert len(started) > 7


@pytest.mark.slow
def test_both_of_cpu_step_take_their_turns(repository):
    command = [sys.executable, "bench/cpu_step.py", "--repeats", "2", "--rows", "2"]
    done = subprocess.run(command, cwd=repository, capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert min(found["ratio"], found["ratio_of_medians"]) > 0
