"""`league --update` makes the table of published results from checkouts alone, and names their commits."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from review.__main__ import main
from review.league import entries
from review.league.entries import read_digest


def git(folder, *words):
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    run = subprocess.run(
        ["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True
    )
    return run.stdout.strip()


@pytest.fixture
def rounds(shared, real_folders, tmp_path):
    """A folder with a checkout of round 5.0: the published results that are here."""
    checkout = tmp_path / "rounds" / "training_results_v5.0"
    for source in sorted({folder.parents[2] for folder in real_folders}):
        shutil.copytree(source, checkout / source.name)
    subprocess.run(["chmod", "-R", "u+w", checkout], check=True)
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "Commit Results")
    return checkout.parent


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A copy of the stored table, which the command updates."""
    path = tmp_path / "published.csv"
    shutil.copyfile(entries.PUBLISHED, path)
    monkeypatch.setattr(entries.update, "__defaults__", (path,))
    return path


def test_a_round_is_what_its_checkout_holds_and_the_others_stay(rounds, table, capsys):
    before = read_digest(table)
    assert main(["league", "--update", str(rounds)]) == 0
    commit = git(rounds / "training_results_v5.0", "rev-parse", "HEAD")
    assert f"5.0: {commit}" in capsys.readouterr().out.splitlines()
    made, lines = read_digest(table), table.read_text().splitlines()
    assert lines[9] == f"# round 5.0: {commit}"
    assert [line.split()[2] for line in lines[:10]] == [
        f"{one}:" for one in sorted({one.round for one in before})
    ]
    folders = {"NVIDIA/results/nyx_n1_ngc25.04_pytorch/bert", "tinycorp/results/tinybox_green/bert"}
    assert made == [one for one in before if one.round != "5.0" or one.folder in folders]
    assert {one.folder for one in made if one.round == "5.0"} == folders


def test_the_same_commits_make_the_same_bytes(rounds, table, tmp_path):
    main(["league", "--update", str(rounds)])
    first = table.read_bytes()
    again = tmp_path / "again" / "training_results_v5.0"
    git(rounds, "clone", "-q", "training_results_v5.0", again)
    assert main(["league", "--update", str(again.parent)]) == 0
    assert table.read_bytes() == first


def test_the_stored_table_names_the_commit_of_every_round_and_is_in_order():
    lines = entries.PUBLISHED.read_text().splitlines()
    commits = dict(entries._COMMIT.findall("\n".join(lines[:10]) + "\n"))
    assert set(commits) == {one.round for one in read_digest()}
    assert all(len(commit) == 40 for commit in commits.values())
    places = [(one.round, one.folder) for one in read_digest()]
    assert places == sorted(places)


def test_what_is_not_its_commit_is_refused_in_one_line_and_leaves_the_table(rounds, table, capsys):
    before, checkout = table.read_bytes(), rounds / "training_results_v5.0"
    log = "NVIDIA/results/nyx_n1_ngc25.04_pytorch/bert/result_3.txt"

    def refused(*words):
        assert main(["league", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert table.read_bytes() == before
        return line

    (checkout / log).write_text("")
    assert f"{log} and 0 others differ from the commit" in refused("--update", str(rounds))
    git(checkout, "checkout", "-q", ".")
    shutil.copyfile(
        checkout / log, checkout / "NVIDIA/results/nyx_n1_ngc25.04_pytorch/bert/result_10.txt"
    )
    assert "result_10.txt and 0 others differ" in refused("--update", str(rounds))
    git(checkout, "clean", "-qfd")
    git(checkout, "sparse-checkout", "set", "tinycorp")
    assert "nyx_n1_ngc25.04_pytorch/bert/result_0.txt and 9 others are not" in refused(
        "--update", str(rounds)
    )
    checkout.rename(checkout.with_name("training_results_v5.1"))
    assert "no rules of BERT for round 5.1" in refused("--update", str(rounds))
    assert "only rebuilds the published table" in refused("--update", str(rounds), "--published")
    shutil.rmtree(rounds)
    (rounds / "training_results_v5.0").mkdir(parents=True)
    assert "a git checkout" in refused("--update", str(rounds))
    (rounds / "training_results_v5.0").rmdir()
    assert "no training_results_v<round>" in refused("--update", str(rounds))
