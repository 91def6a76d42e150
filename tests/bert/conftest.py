"""Small models, records and environments for the trainer's tests."""

import dataclasses
import functools
import importlib
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bert.data.batch import make_batch
from bert.data.format import write_records
from bert.data.records import Metadata
from bert.data.synthetic import synthetic_records
from bert.kernels.support import triton_support
from bert.model.config import BertConfig

from .. import forked
from ..forked import Command
from ..waiting import free_ports
from .plain import model_of

VOCABULARY = 211  # prime, so that the padding to a multiple of 8 is exercised
LENGTH = 48
METADATA = Metadata(max_seq_length=LENGTH, vocab_md5="0" * 32, random_seed=0, dupe_factor=1)  # fmt: skip
NOTHING = {}
RUN = """
PACKED=1 NUM_EVAL_EXAMPLES=17 MAX_SEQ_LENGTH=48 BATCHSIZE=3 PACKING_FACTOR=2 LR=0.05 MAX_STEPS=8 SEED=7
EVAL_ITER_START_SAMPLES=24 EVAL_ITER_SAMPLES=24 TARGET_MLM_ACCURACY=0.9 SUBMISSION_DIVISION=open
LOG_EVERY_STEPS=2 DEVICE=cpu OMP_NUM_THREADS=1
"""
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 3, "intermediate_size": 40, "max_position_embeddings": LENGTH}  # fmt: skip


if triton_support.triton is not None and not torch.cuda.is_available():
    # Triton's interpreter alters its language at each call of a kernel or of a part of one: half of its time.
    interpreter = importlib.import_module("triton.runtime.interpreter")
    alter, kept = interpreter._patch_lang, SimpleNamespace(restore=int)
    interpreter._patch_lang = functools.cache(lambda part: (alter(part), kept)[1])


def pytest_collection_finish(session):
    """What DeepSpeed imports takes three seconds of a core: once, where tests of it are to run."""
    if any(item.get_closest_marker("deepspeed") for item in session.items):
        forked.PRELOADED.append("torch._inductor.compile_fx")


@pytest.fixture
def tiny():
    """A BERT that takes milliseconds."""
    return BertConfig(**SHAPE, initializer_range=0.2)


@pytest.fixture
def make_model():
    """model(config, seed=0, dtype=torch.float64) with reference operations on the CPU."""

    def make(config, seed=0, dtype=torch.float64):
        model = model_of(config, seed)
        words = model.cls.predictions.bias
        own, other = torch.Generator(), torch.Generator()
        # Biases and norms away from 0 and 1, so that a wrong one shows.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1 and parameter is not words:
                    other.manual_seed(seed + 1)
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=other))
            words[: config.vocab_size].normal_(generator=own.manual_seed(seed))
        return model.to(dtype)

    return make


def _records(num_rows, packed=True, seed=0):
    records = synthetic_records(num_rows, LENGTH, VOCABULARY, packed, seed)
    # Half the labels are one word: something to learn.
    common = np.arange(len(records.masked_lm_ids)) % 2 == 0
    labels = np.where(common, 7, records.masked_lm_ids).astype(np.int16)
    return dataclasses.replace(records, masked_lm_ids=labels)


@pytest.fixture
def make_records():
    """records(num_rows, packed=True, seed=0) of the tiny vocabulary."""
    return _records


@pytest.fixture
def batch_of():
    """batch(records, sequences)."""
    return lambda records, sequences: make_batch(records, np.asarray(sequences), LENGTH)


@pytest.fixture
def packed_batch(batch_of):
    """The first five sequences of three rows."""
    return batch_of(_records(3), range(5))


@pytest.fixture(scope="session")
def prepared_files(tmp_path_factory):
    """3 packed shards, an evaluation set and a model; written once, since each takes its digests."""
    folder = tmp_path_factory.mktemp("prepared")
    files = {f"packed/part_{n:05d}_of_00003": _records(37, seed=n) for n in range(3)}
    files["eval/part_eval_10k"] = _records(20, packed=False, seed=9)
    for name in ("packed", "eval", "phase1"):
        (folder / name).mkdir()
    for name, records in files.items():
        write_records(folder / f"{name}.hdf5", records, METADATA)
    (folder / "phase1" / "bert_config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture
def prepared(tmp_path, prepared_files):
    """Environment of a tiny run on files of its own; 2 sequences a row counted."""
    shutil.copytree(prepared_files, tmp_path, dirs_exist_ok=True)
    folders = {"DATADIR_PHASE2_PACKED": "packed", "EVALDIR": "eval"}
    folders |= {"CHECKPOINTDIR_PHASE1": "phase1", "RUN_DIR": "run"}
    own = {name: str(tmp_path / folder) for name, folder in folders.items()}
    return dict(setting.split("=") for setting in RUN.split()) | own


@pytest.fixture
def run_bert():
    """run(environment, ranks=1, arguments=(), odd={}, status=None, **settings) -> the finished
    ``python -m bert`` (of rank 0).

    odd: what rank 1 has in its environment besides; status: the exit status that is expected;
    settings: variables beside those of the environment.
    """

    def run(environment, ranks=1, arguments=(), odd=NOTHING, status=None, **settings):
        base = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
        base |= {"GLOO_SOCKET_IFNAME": "lo"} | environment
        base |= {name: str(value) for name, value in settings.items()}
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
        base["WORLD_SIZE"] = str(ranks)
        own = [{"RANK": str(n)} | (odd if n == 1 else NOTHING) for n in range(ranks)]
        started = [Command("bert", base | one, arguments) for one in own]
        try:
            finished = started[0].finish()
        finally:
            for command in started:
                command.kill()
        assert status in (None, finished.returncode), finished.stderr
        return finished

    return run
