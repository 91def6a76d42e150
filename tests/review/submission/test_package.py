"""A package is what MLCommons takes: official checkers pass, the code is the commit that ran, whole
or not at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from mlperf_logging.result_summarizer import result_summarizer

from review.__main__ import main, parser
from review.logs.output import ReviewError
from review.results.score import load_results
from review.rulebook import official
from review.submission import package as package_module
from review.submission.package import find_code, package
from review.verdict.checking import check
from review.verdict.submission_rules import SCRIPTS

from ..conftest import OWN, write_submission
from ..mutations import RECORD

CONFIG = "configs/config_BOX_1x8x48x1_pack.sh"
FILES = {
    **{name: f"content of {name}\n" for name in SCRIPTS},
    CONFIG: "export DGXNGPU=8\n",
    "LICENSE": "Apache\n",
    "run.sub": "echo\n",
    "implementations/bert/training/loop.py": "pass\n",
    ".gitignore": "results\n",
    ".ci/run": "make test\n",
    "implementations/.hidden/x": "x\n",
}
RUN_BY = ("setup.sh", "run_and_time.sh")  # executable


CODE = "EXAMPLE/benchmarks/bert/implementations/pytorch"
RESULTS = "EXAMPLE/results/BOX/bert"


def git(folder: Path, *arguments: str) -> str:
    """Runs git with a test identity."""
    identity = "-c user.name=test -c user.email=t@example.com -c commit.gpgsign=false"
    command = ["git", "-C", str(folder), *identity.split(), *arguments]
    return subprocess.check_output(command, text=True).strip()


def line(runs: Path, output: Path, description: Path) -> list[str]:
    """The command."""
    options = f"--org EXAMPLE --system BOX -o {output} --description {description}"
    return ["package", str(runs), *options.split()]


def commit_all(folder: Path) -> str:
    """Commits every file; returns the commit."""
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", "a commit")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository_(tmp_path, monkeypatch):
    """A small repository instead of this one."""
    repository = tmp_path / "repository"
    monkeypatch.setattr(package_module, "REPOSITORY", repository)
    for name, content in FILES.items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for name in RUN_BY:
        (repository / name).chmod(0o755)
    git(tmp_path, "init", "-q", str(repository))
    commit_all(repository)
    return repository


@pytest.fixture
def request_(tmp_path, submission, repository_):
    """A request that passes: ten runs of the one commit of the repository."""
    commit = git(repository_, "rev-parse", "HEAD")
    runs = tmp_path / "runs" / "box_20260101"
    write_submission(submission.parents[2], file=OWN)
    shutil.copytree(submission, runs)
    environment = {"git_commit": commit, "packages": {"torch": "2.13.0"}}
    (runs / "environment.json").write_text(json.dumps(environment))
    mlperf = {"system": "BOX_1x8x48x1_pack", "division": "closed"}
    (runs / "config.json").write_text(json.dumps({**RECORD, "mlperf": mlperf}))
    description = submission.parents[2] / "systems" / "dgx.json"
    return parser().parse_args(line(runs, tmp_path / "out" / "package", description))


def replace(request: argparse.Namespace, **fields: object) -> argparse.Namespace:
    """The request with other options."""
    return argparse.Namespace(**{**vars(request), **fields})


def tree(folder: Path) -> dict[str, bytes]:
    """Every file's content by its name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_official_tools_accept_the_package_and_give_our_score(request_, tmp_path):
    made = package(request_)
    assert made.passed
    root = request_.output / "EXAMPLE"
    before = tree(root)
    assert official.check_repository(root).passed
    # The official checkers write into what they check.
    copy = shutil.copytree(root, tmp_path / "copy" / "EXAMPLE")
    assert official.check_package(copy, "5.0.0").passed
    assert tree(copy) == before, "scaling.json is there already, and right"
    (result,) = load_results(request_.output / RESULTS)
    assert result.scaling_factor > 1
    place = str(request_.output / RESULTS)
    score = result_summarizer._compute_strong_score_standalone(
        "bert", "BOX", False, place, "training", "5.0.0"
    )
    assert score[0] == pytest.approx(result.score, rel=1e-9)
    readme = (root / "README.md").read_text()
    assert f"| BOX | 8 | {result.score:.4f} | 10 |" in readme


def test_train_samples_stand_in_for_an_epoch_num_that_counts_epochs(request_):
    for path in request_.runs.glob("result_*.txt"):
        path.write_text(re.sub(r'"epoch_num": \d+', '"epoch_num": 1', path.read_text()))
    assert not package(request_).passed
    assert not request_.output.exists()
    words = line(request_.runs, request_.output, request_.description)
    assert main([*words, "--rcp-bert-train-samples"]) == 0
    assert (request_.output / "EXAMPLE.tar.gz").is_file()
    root = request_.output / "EXAMPLE"
    readme = (request_.output / CODE / "README-BOX.md").read_text()
    assert "| train_samples (--rcp-bert-train-samples) |" in readme
    (result,) = load_results(request_.output / RESULTS, train_samples=True)
    assert f"| BOX | 8 | {result.score:.4f} | 10 |" in (root / "README.md").read_text()


def test_the_code_is_that_of_the_commit_that_ran(request_, repository_):
    (repository_ / "run.sub").write_text("changed after the runs\n")
    (repository_ / "setup.sh").unlink()
    commit_all(repository_)
    (repository_ / "run.sub").write_text("not even committed\n")
    assert package(request_).passed
    code = request_.output / CODE
    for name, content in FILES.items():
        hidden = any(part.startswith(".") for part in Path(name).parts)
        assert (code / name).exists() != hidden, name
        assert hidden or (code / name).read_text() == content
    for name in (*SCRIPTS, "run.sub"):
        assert bool((code / name).stat().st_mode & 0o100) == (name in RUN_BY), name
    facts = json.loads((code / "BOX_pytorch.json").read_text())
    assert facts["config"] == CONFIG
    assert facts["environment"]["packages"] == {"torch": "2.13.0"}
    readme = (code / "README-BOX.md").read_text()
    named = "export DGXNGPU=8", "opt_base_learning_rate"
    for wanted in (facts["commit"], f"source {CONFIG}", *named):
        assert wanted in readme


def test_the_archive_holds_the_folder_and_its_checksum_holds(request_, tmp_path):
    made = package(request_)
    folder, archive, checksum = made.files
    assert checksum.read_text() == f"{made.digest}  {archive.name}\n"
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == made.digest
    with tarfile.open(archive) as tar:
        for member in tar:
            assert member.name.split("/")[0] == "EXAMPLE"
            assert (member.uid, member.gid, member.mtime) == (0, 0, 0)
        # Debian 12's Python 3.11.2 has none.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(tmp_path / "unpacked", **safely)
    assert tree(tmp_path / "unpacked" / "EXAMPLE") == tree(folder)
    again = package(replace(request_, output=tmp_path / "again"))
    assert again.digest == made.digest, "the same input makes the same archive"


def test_what_fails_a_check_is_not_written(request_, writer):
    writer(seed=99).drop("cache_clear").write(request_.runs / "result_0.txt")
    writer(seed=98, target=0.7).write(request_.runs / "result_1.txt")
    made = package(request_)
    assert not made.passed
    assert not made.files
    assert not request_.output.exists()
    assert [*request_.output.parent.iterdir()] == [], "no temporary folder is left"
    findings = [finding for one in made.checked for finding in one.findings]
    assert "target_missed" in {finding.id for finding in findings}
    places = {finding.file for finding in findings} - {None}
    output = request_.output
    assert all(place.is_relative_to(output) for place in places), "none is temporary"


def test_a_second_system_joins_the_package(request_):
    assert package(request_).passed
    first = tree(request_.output / "EXAMPLE")
    assert package(replace(request_, system="BOX2", add=True)).passed
    both = tree(request_.output / "EXAMPLE")
    files = [*(f"result_{i}.txt" for i in range(10)), "scaling.json"]
    expected = {
        f"results/{name}/bert/{file}" for name in ("BOX", "BOX2") for file in files
    }
    assert {name for name in both if name.startswith("results/")} == expected
    changed = {name for name in first if both[name] != first[name]}
    assert changed == {"README.md"}
    assert "| BOX2 |" in both["README.md"].decode()
    assert [*request_.output.parent.iterdir()] == [request_.output]


def test_a_system_of_another_commit_needs_an_implementation_of_its_own(
    request_, repository_
):
    assert package(request_).passed
    (repository_ / "run.sub").write_text("echo 2\n")
    other = replace(request_, system="BOX2", add=True, commit=commit_all(repository_))
    before = tree(request_.output)
    with pytest.raises(ReviewError, match="--implementation"):
        package(other)
    assert tree(request_.output) == before
    assert package(replace(other, implementation="pytorch2")).passed


@pytest.mark.parametrize("add", [False, True])
def test_a_full_disk_leaves_what_was_there(request_, monkeypatch, add):
    if add:
        assert package(request_).passed
        request_ = replace(request_, system="BOX2", add=True)
    before = tree(request_.output) if add else None

    def full(root, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(package_module, "_archive", full)
    with pytest.raises(ReviewError, match="No space left"):
        package(request_)
    assert (tree(request_.output) if request_.output.exists() else None) == before
    assert len(list(request_.output.parent.iterdir())) == int(add)


def environment(git_commit):
    """A change of what the run says of its commit."""
    text = json.dumps({"git_commit": git_commit})
    return lambda r: (r.runs / "environment.json").write_text(text)


@pytest.mark.parametrize(("change", "fields", "says"), [
    (None, {"org": "a b"}, "--org"),
    (None, {"org": "../x"}, "--org"),
    (None, {"system": ".hidden"}, "--system"),
    (None, {"implementation": ""}, "--implementation"),
    (None, {"org": "OTHER"}, "submitter is 'EXAMPLE'"),
    (None, {"description": Path("none.json")}, "python -m review system"),
    (None, {"commit": "0" * 40}, "no commit"),
    (None, {"commit": "--output=x"}, "no commit"),
    (None, {"config": "configs/none.sh"}, "--config"),
    (None, {"add": True}, "to add to"),
    (lambda r: (r.runs / "environment.json").unlink(), {}, "--commit"),
    (environment("0123abc-dirty"), {}, "not committed"),
    (environment("main"), {}, "is not a commit"),
    (environment("f" * 40), {}, "no commit"),
    (lambda r: (r.runs / "config.json").unlink(), {}, "--config"),
    (lambda r: r.output.mkdir(parents=True), {}, "exists"),
    (lambda r: shutil.copytree(r.runs, r.runs / "more"), {}, "give the one folder"),
    (lambda r: r.output.parent.write_text(""), {}, "out"),
    (lambda r: shutil.rmtree(package_module.REPOSITORY / ".git"), {}, "commit"),
])  # fmt: skip
def test_wrong_input_is_a_one_line_error_and_writes_nothing(
    request_, tmp_path, change, fields, says
):
    if change:
        change(request_)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ReviewError) as error:
        package(replace(request_, **fields))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_commit_may_be_named_as_git_describe_does(request_, repository_):
    commit = git(repository_, "rev-parse", "HEAD")
    for change in (environment(commit), environment(f"v1.0-rc1-12-g{commit}")):
        change(request_)
        assert find_code(request_.runs, None, None).commit == commit
    environment("v1.0")(request_)
    with pytest.raises(ReviewError, match="is not a commit"):
        find_code(request_.runs, None, None)
    git(repository_, "tag", "-a", "-m", "a tag", "v1.0")
    assert find_code(request_.runs, None, None).commit == commit


def test_a_commit_without_the_scripts_of_the_rules_is_refused(request_, repository_):
    (repository_ / "verify_dataset.sh").unlink()
    with pytest.raises(ReviewError, match=r"lacks verify_dataset\.sh"):
        package(replace(request_, commit=commit_all(repository_)))


def test_the_command_packages_this_repository(
    request_, repository, monkeypatch, capsys
):
    monkeypatch.setattr(package_module, "REPOSITORY", repository)
    head = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    if subprocess.run(head, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    arguments = line(request_.runs, request_.output, request_.description)
    arguments += ["--json", "--commit", "HEAD"]
    config = next((repository / "configs").glob("config_*x*.sh")).name
    assert main([*arguments, "--config", config]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    code = request_.output / CODE
    names = {path.name for path in code.iterdir()}
    assert names >= {*SCRIPTS, "run.sub", "configs", "input_preprocessing"}
    (request_.runs / "result_9.txt").unlink()
    shutil.rmtree(request_.output)
    assert main([*arguments, "--config", config]) == 1
    assert json.loads(capsys.readouterr().out)["files"] == []


def test_logs_are_numbered_from_zero_byte_for_byte_with_their_power(
    request_, power_files
):
    runs, results = request_.runs, request_.output / RESULTS
    # The last by number, the ninth of the package.
    (runs / "result_0.txt").rename(runs / "result_10.txt")
    power_files(runs)
    assert package(request_).passed
    for index in range(10):
        for name in ("result_{}.txt", "power/result_{}/node_0.txt"):
            copied = (results / name.format(index)).read_bytes()
            assert copied == (runs / name.format(index + 1)).read_bytes()
    held = {f"result_{index}.txt" for index in range(10)}
    assert {path.name for path in results.iterdir()} == held | {"scaling.json", "power"}
    assert len([*(results / "power").iterdir()]) == 10
    (before,), (after,) = load_results(runs), load_results(results)
    assert after.energy.joules == before.energy.joules
    readme = (request_.output / CODE / "README-BOX.md").read_text()
    assert f"| energy | {after.energy.joules:,.2f} J |" in readme


@pytest.mark.parametrize("output", ["link/package", "out/../package"])
def test_a_package_lies_wherever_its_folder_is_reached_from(
    request_, tmp_path, output, power_files
):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    power_files(request_.runs)
    made = package(replace(request_, output=tmp_path / output))
    assert made.passed
    assert (tmp_path / output / "EXAMPLE.tar.gz").is_file()


def test_runs_of_another_model_are_not_packaged_as_closed(request_):
    path = request_.runs / "config.json"
    other = {**json.loads(path.read_text()), "model": {"hidden_size": 128}}
    path.write_text(json.dumps(other))
    made = package(request_)
    assert not made.passed
    said = [finding.message for one in made.checked for finding in one.findings]
    assert any("not the benchmark: hidden_size 128, not 1024" in each for each in said)
    assert not request_.output.exists()


def test_a_package_of_our_runs_records_their_settings(request_):
    assert package(request_).passed
    (facts,) = request_.output.rglob("BOX_*.json")
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "settings": {}}))
    (checked, *_) = check(request_.output)
    assert "its settings are not recorded" in checked.findings[0].message
