"""A package is what MLCommons takes: official checkers pass, the code is the commit that ran, whole or not at all."""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from review.__main__ import parser
from review.logs.output import ReviewError
from review.results.score import load_results
from review.rulebook import official
from review.submission import package as package_module
from review.submission.package import find_code, package
from review.verdict.checking import check
from review.verdict.submission_rules import SCRIPTS

from ..conftest import LogWriter, git, official_score, write_power
from ..verdict.damage import own, record

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


def commit_all(folder: Path) -> str:
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", "a commit")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository_(tmp_path, monkeypatch):
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
    own(submission)
    runs = shutil.copytree(submission, tmp_path / "runs" / "box_20260101")
    environment = {"git_commit": commit, "packages": {"torch": "2.13.0"}}
    (runs / "environment.json").write_text(json.dumps(environment))
    record(runs, mlperf={"system": "BOX_1x8x48x1_pack", "division": "closed"})
    description = submission.parents[2] / "systems" / "dgx.json"
    options = f"--org EXAMPLE --system BOX -o {tmp_path / 'out' / 'package'}"
    words = ["package", str(runs), *options.split(), "--description", str(description)]
    return replace(parser().parse_args(words), words=words)


def replace(request: argparse.Namespace, **fields: object) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(request), **fields})


def tree(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_official_tools_accept_the_package_and_give_our_score(request_, tmp_path):
    assert package(request_).passed
    root = request_.output / "EXAMPLE"
    before = tree(root)
    assert official.check_repository(root).passed
    # The official checkers write into what they check.
    copy = shutil.copytree(root, tmp_path / "copy" / "EXAMPLE")
    assert official.check_package(copy, "5.0.0").passed
    assert tree(copy) == before, "scaling.json is there already, and right"
    (result,) = load_results(request_.output / RESULTS)
    assert result.scaling_factor > 1
    score, _ = official_score(request_.output / RESULTS)
    assert score == pytest.approx(result.score, rel=1e-9)
    assert f"| BOX | 8 | {score:.4f} | 10 |" in (root / "README.md").read_text()


def test_train_samples_stand_in_for_an_epoch_num_that_counts_epochs(request_, command):
    for path in request_.runs.glob("result_*.txt"):
        path.write_text(re.sub(r'"epoch_num": \d+', '"epoch_num": 1', path.read_text()))
    assert not package(request_).passed
    assert not request_.output.exists()
    assert command(*request_.words, "--rcp-bert-train-samples").status == 0
    assert (request_.output / "EXAMPLE.tar.gz").is_file()
    readme = (request_.output / CODE / "README-BOX.md").read_text()
    assert "| train_samples (--rcp-bert-train-samples) |" in readme
    (result,) = load_results(request_.output / RESULTS, train_samples=True)
    readme = (request_.output / "EXAMPLE" / "README.md").read_text()
    assert f"| BOX | 8 | {result.score:.4f} | 10 |" in readme
    for more, status in (((), 1), (("--rcp-bert-train-samples",), 0)):
        assert command("check", request_.output, *more).status == status


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


def broken_logs(runs):
    LogWriter(seed=99).drop("cache_clear").write(runs / "result_0.txt")
    LogWriter(seed=98, target=0.7).write(runs / "result_1.txt")


def another_model(runs):
    path = runs / "config.json"
    other = {"model": {"hidden_size": 128}}
    path.write_text(json.dumps(json.loads(path.read_text()) | other))


@pytest.mark.parametrize(("change", "says"), [
    (broken_logs, "target_missed"),
    (another_model, "not the benchmark: hidden_size 128, not 1024"),
])  # fmt: skip
def test_what_fails_a_check_is_not_written(request_, change, says):
    change(request_.runs)
    made = package(request_)
    assert (made.passed, made.files) == (False, ())
    assert not request_.output.parent.exists()
    assert not [*request_.output.parents[1].glob(".package*")], "none is left"
    findings = [finding for one in made.checked for finding in one.findings]
    assert any(says in f"{finding.id} {finding.message}" for finding in findings)
    places = {finding.file for finding in findings} - {None}
    output = request_.output
    assert all(place.is_relative_to(output) for place in places), "none is temporary"


def test_a_second_system_joins_the_package(request_):
    assert package(request_).passed
    first = tree(request_.output / "EXAMPLE")
    assert package(replace(request_, system="BOX2", add=True)).passed
    both = tree(request_.output / "EXAMPLE")
    expected = [*(f"result_{i}.txt" for i in range(10)), "scaling.json"]
    for place in ("results/BOX/bert/", "results/BOX2/bert/"):
        found = sorted(name for name in both if name.startswith(place))
        assert found == [place + name for name in expected]
    changed = {name for name in first if both[name] != first[name]}
    assert changed == {"README.md"}
    assert "| BOX2 |" in both["README.md"].decode()
    assert [*request_.output.parent.iterdir()] == [request_.output]


def test_another_commit_needs_an_implementation_of_its_own(request_, repository_):
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
    folder = request_.output.parents[1]
    before = tree(folder), sorted(folder.rglob("*"))

    def full(root, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(package_module, "_archive", full)
    with pytest.raises(ReviewError, match="No space left"):
        package(request_)
    assert (tree(folder), sorted(folder.rglob("*"))) == before


def environment(git_commit):
    text = json.dumps({"git_commit": git_commit})
    return lambda r: (r.runs / "environment.json").write_text(text)


def without_a_script(request):
    (package_module.REPOSITORY / "verify_dataset.sh").unlink()
    commit_all(package_module.REPOSITORY)


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
    (without_a_script, {"commit": "HEAD"}, "lacks verify_dataset.sh"),
])  # fmt: skip
def test_wrong_input_is_a_line_and_no_more(request_, tmp_path, change, fields, says):
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


def test_the_command_packages_this_tree(request_, repository, monkeypatch, command):
    monkeypatch.setattr(package_module, "REPOSITORY", repository)
    head = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    if subprocess.run(head, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    config = next((repository / "configs").glob("config_*x*.sh")).name
    words = [*request_.words, "--json", "--commit", "HEAD", "--config", config]
    status, *_ = said = command(*words)
    assert (status, said.json["passed"]) == (0, True)
    names = {path.name for path in (request_.output / CODE).iterdir()}
    assert names >= {*SCRIPTS, "run.sub", "configs", "input_preprocessing"}
    (request_.runs / "result_9.txt").unlink()
    shutil.rmtree(request_.output)
    status, *_ = said = command(*words)
    assert (status, said.json["files"]) == (1, [])


def test_logs_are_numbered_from_zero_byte_for_byte_with_their_power(request_):
    runs, results = request_.runs, request_.output / RESULTS
    # The last by number, the ninth of the package.
    (runs / "result_0.txt").rename(runs / "result_10.txt")
    write_power(runs)
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
def test_a_package_lies_wherever_its_folder_is_reached_from(request_, tmp_path, output):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    write_power(request_.runs)
    assert package(replace(request_, output=tmp_path / output)).passed
    assert (tmp_path / output / "EXAMPLE.tar.gz").is_file()


def test_a_package_of_our_runs_records_their_settings(request_):
    assert package(request_).passed
    (facts,) = request_.output.rglob("BOX_*.json")
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "settings": {}}))
    (checked, *_) = check(request_.output)
    assert "its settings are not recorded" in checked.findings[0].message
