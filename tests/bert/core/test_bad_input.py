"""Wrong input: one line on stderr, exit status 2, no traceback, no result left behind."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import h5py
import pytest
import torch

from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, from_env


def _model(environment, **changes):
    path = Path(environment["CHECKPOINTDIR_PHASE1"], "bert_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


def _foreign(path):
    with h5py.File(path, "w") as file:
        file["something"] = [1, 2, 3]


def _shard(environment):
    return Path(environment["DATADIR_PHASE2_PACKED"], "part_00000_of_00003.hdf5")


def _pt(environment, value):
    path = Path(environment["RUN_DIR"]).parent / "weights.pt"
    torch.save(value, path)
    environment["INIT_CHECKPOINT"] = str(path)


CASES = {
    "missing variable": (lambda e: e.pop("LR"), "LR is not set"),
    "malformed": (lambda e: e.update(BATCHSIZE="many"), "BATCHSIZE='many': expected an integer"),
    "out of range": (lambda e: e.update(TARGET_MLM_ACCURACY="72"), "TARGET_MLM_ACCURACY='72'"),
    "unknown attention": (lambda e: e.update(ATTENTION="best"), "ATTENTION=best"),
    "unknown fused name": (lambda e: e.update(FUSED="softmax"), "FUSED names softmax"),
    "fused without the hardware": (lambda e: e.update(FUSED="bias_gelu"), "the device is a CPU"),
    "no GPU": (lambda e: e.update(DEVICE="cuda"), "DEVICE=cuda"),
    "rank past the world": (lambda e: e.update(RANK="5"), "RANK=5"),
    "no data folder": (lambda e: e.update(DATADIR_PHASE2_PACKED="/nowhere"), "DATADIR_PHASE2_PACKED=/nowhere"),
    "data unset": (lambda e: e.pop("DATADIR_PHASE2_PACKED"), "DATADIR_PHASE2_PACKED is not set"),
    "empty data folder": (lambda e: [p.unlink() for p in _shard(e).parent.iterdir()], "no record files"),
    "truncated shard": (lambda e: _truncate(_shard(e)), "part_00000_of_00003.hdf5"),
    "foreign HDF5": (lambda e: _foreign(_shard(e)), "part_00000_of_00003.hdf5"),
    "not HDF5": (lambda e: _shard(e).write_text("text"), "cannot be read as HDF5"),
    "too little data": (lambda e: e.update(BATCHSIZE="5000"), "rows of training data do not fill one step"),
    "small eval set": (lambda e: e.update(NUM_EVAL_EXAMPLES="21"), "20 sequences, and NUM_EVAL_EXAMPLES is 21"),
    "no eval set": (lambda e: shutil.rmtree(e["EVALDIR"]), "EVALDIR="),
    "no bert_config": (lambda e: Path(e["CHECKPOINTDIR_PHASE1"], "bert_config.json").unlink(), "bert_config.json"),
    "bert_config not JSON": (lambda e: Path(e["CHECKPOINTDIR_PHASE1"], "bert_config.json").write_text("{"), "not JSON"),
    "heads do not divide": (lambda e: _model(e, num_attention_heads=5), "bert_config.json: hidden_size=24 is not a"),
    "vocabulary mismatch": (lambda e: _model(e, vocab_size=100), "vocab_size 100"),
    "sequence too long": (lambda e: _model(e, max_position_embeddings=32), "max_position_embeddings 32"),
    "data longer than rows": (lambda e: e.update(MAX_SEQ_LENGTH="32"), "MAX_SEQ_LENGTH"),
    "checkpoint missing": (lambda e: e.update(INIT_CHECKPOINT="/no.pt"), "INIT_CHECKPOINT=/no.pt: no such file"),
    "checkpoint by the name of a model of the Hub": (
        lambda e: e.update(INIT_CHECKPOINT="bert-base-uncased"),
        "hf download bert-base-uncased --local-dir bert-base-uncased, then INIT_CHECKPOINT=bert-base-uncased",
    ),
    "checkpoint not weights": (lambda e: _pt(e, {"model": 3}), "expected a state dict"),
    "checkpoint of another model": (lambda e: _pt(e, {"x": torch.zeros(2)}), "x is not in this model"),
    "checkpoint with code": (lambda e: _pt(e, {"model": Path("/")}), "not a readable checkpoint"),
    "number too large": (lambda e: e.update(MAX_STEPS="1e400"), "MAX_STEPS='1e400'"),
    "closed and resumed": (
        lambda e: e.update(
            SUBMISSION_DIVISION="closed", RESUME="1", CHECKPOINT_DIR=e["EVALDIR"]
        ),
        "RESUME=1 (a run is timed from its start, and the log of a resumed one leaves out the time trained before)",
    ),
    "resume without folder": (lambda e: e.update(RESUME="1"), "CHECKPOINT_DIR is not"),
    "closed without weights": (
        lambda e: e.update(SUBMISSION_DIVISION="closed"),
        "INIT_CHECKPOINT= (training starts from model.ckpt-28252",
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", [False, True], ids=["run", "check"])
@pytest.mark.parametrize("case", CASES)
def test_wrong_input_is_one_clear_line(prepared, case, check, capfd, monkeypatch):
    from bert.__main__ import main

    spoil, message = CASES[case]
    environment = dict(prepared)
    spoil(environment)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--check"] if check else [], environment) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("bert: error: ")
    assert message in lines[-1]
    assert not any("Traceback" in line for line in lines)
    told = Path(environment["RUN_DIR"], "error_0.txt")
    if check:  # it leaves nothing in the folder that it judges
        assert not told.exists()
    else:
        assert told.read_text().strip() == lines[-1].removeprefix("bert: error: ")


def test_check_prints_what_would_run(prepared, run_bert):
    finished = run_bert(prepared, arguments=("--check",))
    assert finished.returncode == 0, finished.stderr
    assert re.search(r"^global batch +6 sequences = 3 rows", finished.stdout, re.M)
    assert "3 files in" in finished.stdout
    assert not Path(prepared["RUN_DIR"]).exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_submission_that_sees_no_gpu_stops_instead_of_training_on_the_cpu(prepared):
    from bert.pretraining.run import _check_gpu

    closed = prepared | {"SUBMISSION_DIVISION": "closed", "DEVICE": "auto"}
    with pytest.raises(ConfigError, match=r"^no GPU is seen \(.*set DEVICE=cpu$"):
        _check_gpu(from_env(PretrainingConfig, closed))
    on_cpu, open_ = {"DEVICE": "cpu"}, {"SUBMISSION_DIVISION": "open"}
    for changed in (on_cpu, open_, {"SYNTH_DATA": "1"}):
        _check_gpu(from_env(PretrainingConfig, closed | changed))
