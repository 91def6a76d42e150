"""python -m bert --check: description of the run, and the rules' verdict."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import h5py
import pytest

from bert.__main__ import main
from bert.pretraining import identity

from ..states import content


def test_the_check_describes_the_run(prepared, run_bert):
    done = run_bert(
        prepared, arguments=("--check",), status=0, WORLD_SIZE=2, EVAL_ITER_SAMPLES=24
    )
    lines = [line.partition("  ") for line in done.stdout.splitlines()]
    said = {name: value.strip() for name, _, value in lines}
    batch = "6 sequences = 3 rows x 1 accumulated x 1 ranks x packing factor 2"
    assert said["global batch"] == batch
    assert said["steps"].startswith("at most 8 (48 samples)")
    assert said["learning rate"].startswith("mlperf: 0.05 at step 1, ")
    # The open division may choose its interval.
    assert said["evaluation"] == "every 24 samples from 24, target 0.9"
    assert said["data"].startswith("3 files in ")
    assert "continuing has helped" not in said["data"], "it starts from scratch"
    ids = copies = 0
    for path in Path(prepared["DATADIR_PHASE2_PACKED"]).glob("*.hdf5"):
        with h5py.File(path) as file:
            ids += len(file["input_ids"])
            copies = file.attrs["dupe_factor"]
    told = re.search(r"a text of about ([\d,]+) tokens", said["data"])
    assert told is not None
    assert int(told[1].replace(",", "")) == pytest.approx(ids / copies, rel=0.05)
    assert said["attention"] == "sdpa_loop (the device is a CPU)"
    assert "GELU in its tanh form" in said["model"]


def test_the_check_builds_the_batches_of_the_run(prepared, run_bert):
    folder = prepared["DATADIR_PHASE2_PACKED"]
    unpacked = {"PACKED": "0", "PACKING_FACTOR": "1", "EXCHANGE_GROUP": "2"}
    given = prepared | unpacked | {"DATADIR_PHASE2": folder}
    done = run_bert(given, arguments=("--check",), status=2)
    said = "EXCHANGE_GROUP=2 needs records that are not packed, and these are"
    assert said in done.stderr


@pytest.mark.parametrize(
    ("launched", "ranks"),
    [({}, 8), ({"WORLD_SIZE": "2"}, 2), ({"EMULATE_RANKS": "4"}, 4)],
)  # fmt: skip
def test_a_check_in_a_shell_describes_the_configs_run(
    prepared, run_main, launched, ranks
):
    config = {"DGXNNODES": "2", "DGXNGPU": "4", "EVAL_ITER_SAMPLES": "0", "TARGET_MLM_ACCURACY": "0"}  # fmt: skip
    assert f" {ranks} ranks" in run_main(prepared | config | launched)


@pytest.fixture
def run_main(capsys):
    """What --check says of an environment."""

    def run(environment):
        assert main(["--check"], environment) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def test_a_refused_check_writes_nothing_into_the_folder_of_a_finished_run(
    prepared, run_bert, tmp_path
):
    folder = tmp_path / "run"
    run_bert(prepared, MAX_STEPS=1)
    (folder / "error_0.txt").unlink()  # it missed its target
    before = content(folder)
    run_bert(prepared, arguments=("--check",), status=2, MAX_STEPS=1, LR=0.06)
    assert content(folder) == before


def test_a_trial_that_is_done_counts_only_for_its_own_settings_and_data(
    prepared, run_bert, tmp_path
):
    environment = prepared | {"MAX_STEPS": "1"}
    done = run_bert(environment)
    assert (tmp_path / "run" / "result_0.txt").is_file(), done.stderr
    data = tmp_path / "data"
    shutil.copytree(prepared["DATADIR_PHASE2_PACKED"], data)
    same = environment | {"DATADIR_PHASE2_PACKED": str(data), "LOG_EVERY_STEPS": "3"}
    check = ("--check",)
    run_bert(same, arguments=check, status=0)
    (data / "index.json").unlink(missing_ok=True)
    first = min(data.glob("*.hdf5"))
    first.rename(first.with_name("other.hdf5"))
    changed = {"LR": "0.06", "SEED": "6", "OPT_LAMB_BETA_1": "0.8", "training data": ""}
    for name, value in changed.items():
        given = (same if name == "training data" else environment) | {name: value}
        (*_, said) = run_bert(given, arguments=check, status=2).stderr.splitlines()
        assert f"result_0.txt is of a run with {name} " in said, said
        last = "use the same settings and data, or another RUN_NAME (RUN_DIR)"
        assert said.endswith(last)


@pytest.mark.parametrize("name", ["part_00000.hdf5", "part_00000.hdf", "part_00000"])
def test_a_finished_trial_is_known_by_its_data_whatever_the_files_are_called(
    name, tmp_path
):
    (tmp_path / name).write_bytes(b"a")
    before = identity.contents(tmp_path)
    (tmp_path / name).write_bytes(b"ab")
    assert identity.contents(tmp_path) != before


def test_of_a_finished_trials_data_a_single_file_counts_and_a_hidden_one_does_not(
    tmp_path,
):
    data = tmp_path / "x.bin"
    data.write_bytes(b"a")
    before = identity.contents(data), identity.contents(tmp_path)
    data.write_bytes(b"ab")
    (tmp_path / ".DS_Store").write_bytes(b"a")
    assert identity.contents(data) != before[0]
    assert identity.contents(tmp_path) == before[1]
