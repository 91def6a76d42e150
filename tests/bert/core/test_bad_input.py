"""Wrong input: one line on stderr, exit status 2, no traceback, no result left behind; what an error
that nobody foresaw says.
"""

import json
import os
import shutil
from pathlib import Path

import h5py
import pytest
import torch

from bert.__main__ import main
from bert.core import rundir
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.run import _check_gpu
from common.env import ConfigError, from_env


def _model(environment, **changes):
    path = Path(environment["CHECKPOINTDIR_PHASE1"], "bert_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _foreign(path):
    with h5py.File(path, "w") as file:
        file["something"] = [1, 2, 3]


def _shard(environment):
    return Path(environment["DATADIR_PHASE2_PACKED"], "part_00000_of_00003.hdf5")


def _shape(environment):
    return Path(environment["CHECKPOINTDIR_PHASE1"], "bert_config.json")


def _pt(environment, value):
    path = Path(environment["RUN_DIR"]).parent / "weights.pt"
    torch.save(value, path)
    environment["INIT_CHECKPOINT"] = str(path)


# What is said, of settings (empty: unset) or of what is done to the files of the run.
CASES = {
    "LR is not set": {"LR": ""},
    "BATCHSIZE='many': expected an integer": {"BATCHSIZE": "many"},
    "MAX_STEPS='1e400'": {"MAX_STEPS": "1e400"},
    "BATCHSZIE: did you mean BATCHSIZE?": {"BATCHSZIE": "8"},
    "ATTENTION=best": {"ATTENTION": "best"},
    "FUSED names softmax": {"FUSED": "softmax"},
    "the device is a CPU": {"FUSED": "bias_gelu"},
    "DEVICE=cuda": {"DEVICE": "cuda"},
    "RANK=5": {"RANK": "5"},
    "DATADIR_PHASE2_PACKED=/nowhere": {"DATADIR_PHASE2_PACKED": "/nowhere"},
    "DATADIR_PHASE2_PACKED is not set": {"DATADIR_PHASE2_PACKED": ""},
    "no record files": lambda e: [path.unlink() for path in _shard(e).parent.iterdir()],
    "/part_00000_of_00003.hdf5": lambda e: os.truncate(_shard(e), _shard(e).stat().st_size * 2 // 3),
    "part_00000_of_00003.hdf5": lambda e: _foreign(_shard(e)),
    "cannot be read as HDF5": lambda e: _shard(e).write_text("text"),
    "rows of training data do not fill one step": {"BATCHSIZE": "5000"},
    "20 sequences, and NUM_EVAL_EXAMPLES is 21": {"NUM_EVAL_EXAMPLES": "21"},
    "EVALDIR=": lambda e: shutil.rmtree(e["EVALDIR"]),
    "bert_config.json": lambda e: _shape(e).unlink(),
    "not JSON": lambda e: _shape(e).write_text("{"),
    "bert_config.json: hidden_size=24 is not a": lambda e: _model(e, num_attention_heads=5),
    "vocab_size 100": lambda e: _model(e, vocab_size=100),
    "max_position_embeddings 32": lambda e: _model(e, max_position_embeddings=32),
    "MAX_SEQ_LENGTH": {"MAX_SEQ_LENGTH": "32"},
    "INIT_CHECKPOINT=/no.pt: no such file": {"INIT_CHECKPOINT": "/no.pt"},
    "expected a state dict": lambda e: _pt(e, {"model": 3}),
    "x is not in this model": lambda e: _pt(e, {"x": torch.zeros(2)}),
    "not a readable checkpoint": lambda e: _pt(e, {"model": Path("/")}),
    "CHECKPOINT_DIR is not": {"RESUME": "1"},
    "RESUME=1 (": {"SUBMISSION_DIVISION": "closed", "RESUME": "1", "CHECKPOINT_DIR": "here"},
    "INIT_CHECKPOINT= (training starts from": {"SUBMISSION_DIVISION": "closed"},
}  # fmt: skip


@pytest.mark.parametrize("check", [False, True], ids=["run", "check"])
@pytest.mark.parametrize("message", CASES)
def test_wrong_input_is_one_clear_line(prepared, message, check, capfd, monkeypatch):
    spoil, environment = CASES[message], dict(prepared)
    if callable(spoil):
        spoil(environment)
    else:
        environment |= spoil
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--check"] if check else [], environment) == 2
    said = capfd.readouterr().err
    last = said.splitlines()[-1]
    assert last.startswith("bert: error: ")
    assert message in last
    assert "Traceback" not in said
    told = Path(environment["RUN_DIR"], "error_0.txt")
    if check:  # it leaves nothing in the folder that it judges
        assert not told.parent.exists()
    else:
        assert told.read_text().strip() == last.removeprefix("bert: error: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_submission_that_sees_no_gpu_stops_instead_of_training_on_the_cpu(prepared):
    closed = prepared | {"SUBMISSION_DIVISION": "closed", "DEVICE": "auto"}
    with pytest.raises(ConfigError, match=r"^no GPU is seen \(.*set DEVICE=cpu$"):
        _check_gpu(from_env(PretrainingConfig, closed))
    on_cpu, open_ = {"DEVICE": "cpu"}, {"SUBMISSION_DIVISION": "open"}
    for changed in (on_cpu, open_, {"SYNTH_DATA": "1"}):
        _check_gpu(from_env(PretrainingConfig, closed | changed))


@pytest.mark.parametrize(
    ("error", "on_gpu", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True, "lower BATCHSIZE"),
        (RuntimeError("an illegal memory access"), True, "self_check.py names the"),
        (RuntimeError("an illegal memory access"), False, "illegal memory access\n"),
    ],
)
def test_an_error_on_a_gpu_says_what_to_do(error, on_gpu, advice, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    assert rundir.failed(rundir.RunConfig(), "bert", error) == 1
    assert advice in capsys.readouterr().err
