"""Small models, records and environments for the trainer's tests."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert.data.batch import PretrainingBatch, make_batch
from bert.data.format import write_records
from bert.data.records import Metadata, Records
from bert.data.synthetic import synthetic_records
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig

from .. import forked
from ..forked import Command
from ..waiting import free_ports
from .plain import model_of

VOCABULARY = 211  # prime, so that the padding to a multiple of 8 is exercised
LENGTH = 48
NOTHING: Mapping[str, str] = {}


SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 3, "intermediate_size": 40, "max_position_embeddings": LENGTH}  # fmt: skip


def pytest_collection_finish(session: pytest.Session) -> None:
    """What DeepSpeed imports takes three seconds of a core: once, where tests of it are to run."""
    if any(item.get_closest_marker("deepspeed") for item in session.items):
        forked.PRELOADED.append("torch._inductor.compile_fx")


@pytest.fixture
def tiny() -> BertConfig:
    """A BERT that takes milliseconds."""
    return BertConfig(**SHAPE, initializer_range=0.2)


@pytest.fixture
def make_model() -> Callable[..., BertForPreTraining]:
    """model(config, seed=0, dtype=torch.float64) with reference operations on the CPU."""

    def make(
        config: BertConfig, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> BertForPreTraining:
        model = model_of(config, seed)
        # Biases and norms away from 0 and 1, so that a wrong one shows.
        with torch.no_grad():
            for parameter in model.parameters():
                if (
                    parameter.ndim == 1
                    and parameter.shape[0] != model.config.padded_vocab_size
                ):
                    other = torch.Generator().manual_seed(seed + 1)
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=other))
            model.cls.predictions.bias[: config.vocab_size].normal_(
                generator=torch.Generator().manual_seed(seed)
            )
        return model.to(dtype)

    return make


def _records(num_rows: int, packed: bool = True, seed: int = 0) -> Records:
    records = synthetic_records(num_rows, LENGTH, VOCABULARY, packed, seed)
    # Half the labels are one word: something to learn.
    common = np.arange(len(records.masked_lm_ids)) % 2 == 0
    labels = np.where(common, 7, records.masked_lm_ids).astype(np.int16)
    return dataclasses.replace(records, masked_lm_ids=labels)


@pytest.fixture
def make_records() -> Callable[..., Records]:
    """records(num_rows, packed=True, seed=0) of the tiny vocabulary."""
    return _records


@pytest.fixture
def batch_of() -> Callable[..., PretrainingBatch]:
    """batch(records, sequences)."""
    return lambda records, sequences: make_batch(records, np.asarray(sequences), LENGTH)


@pytest.fixture(scope="session")
def prepared_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 packed shards, an evaluation set and a model; written once, since each takes its digests."""
    folder = tmp_path_factory.mktemp("prepared")
    metadata = Metadata(
        max_seq_length=LENGTH, vocab_md5="0" * 32, random_seed=0, dupe_factor=1
    )
    for name in ("packed", "eval", "phase1"):
        (folder / name).mkdir()
    for shard in range(3):
        path = folder / "packed" / f"part_{shard:05d}_of_00003.hdf5"
        write_records(path, _records(37, seed=shard), metadata)
    evaluation = _records(20, packed=False, seed=9)
    write_records(folder / "eval" / "part_eval_10k.hdf5", evaluation, metadata)
    (folder / "phase1" / "bert_config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture
def prepared(tmp_path: Path, prepared_files: Path) -> dict[str, str]:
    """Environment of a tiny run on files of its own; 2 sequences a row counted."""
    shutil.copytree(prepared_files, tmp_path, dirs_exist_ok=True)
    return {
        "PACKED": "1",
        "DATADIR_PHASE2_PACKED": str(tmp_path / "packed"),
        "EVALDIR": str(tmp_path / "eval"),
        "CHECKPOINTDIR_PHASE1": str(tmp_path / "phase1"),
        "RUN_DIR": str(tmp_path / "run"),
        "NUM_EVAL_EXAMPLES": "17",
        "MAX_SEQ_LENGTH": str(LENGTH),
        "BATCHSIZE": "3",
        "PACKING_FACTOR": "2",
        "LR": "0.05",
        "MAX_STEPS": "8",
        "EVAL_ITER_START_SAMPLES": "24",
        "EVAL_ITER_SAMPLES": "24",
        "TARGET_MLM_ACCURACY": "0.9",
        "SUBMISSION_DIVISION": "open",
        "SEED": "7",
        "LOG_EVERY_STEPS": "2",
        "DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def run_bert(repository: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """run(environment, ranks=1, arguments=(), odd={}, status=None, **settings) -> the finished
    ``python -m bert`` (of rank 0).

    odd: what rank 1 has in its environment besides; status: the exit status that is expected;
    settings: variables beside those of the environment.
    """

    def run(
        environment: dict[str, str],
        ranks: int = 1,
        arguments: tuple[str, ...] = (),
        odd: Mapping[str, str] = NOTHING,
        status: int | None = None,
        **settings: object,
    ) -> Any:
        base = {
            "PATH": os.environ["PATH"],
            "HOME": "/nonexistent",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        base |= environment | {name: str(value) for name, value in settings.items()}
        base |= {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports()),
        }
        own = [
            {"RANK": str(rank)} | (odd if rank == 1 else {}) for rank in range(ranks)
        ]
        started = [Command("bert", base | one, arguments) for one in own]
        try:
            finished = started[0].finish()
        finally:
            for command in started:
                command.kill()
        assert status in (None, finished.returncode), finished.stderr
        return finished

    return run
