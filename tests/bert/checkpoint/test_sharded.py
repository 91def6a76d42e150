"""Large models: no rank holds all weights, and each rank writes its part of a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from bert.checkpoint import sharded, weights
from bert.checkpoint.huggingface import WORDS
from bert.checkpoint.save import CheckpointConfig, load_newest, saved_checkpoints
from bert.checkpoint.weights import Checksum, chunks_of, load_weights, read_state_dict
from bert.core.dist import World
from bert.model import init
from bert.model.config import BertConfig
from bert.pretraining import resume

from ...waiting import wait_until
from ..plain import CPU, model_of, step_of
from ..ranks import run_ranks
from ..states import folders, same


def _part(rank, num_ranks, token=7):
    ended = threading.Event()
    return sharded.Part(rank=rank, num_ranks=num_ranks, token=token, abandoned=ended)


def _step(config, world, by_chunks, dtype=torch.bfloat16):
    with init.uninitialized() if by_chunks else CPU:
        model = model_of(config, seed=None)
    chunks = init.first_weights(model, 3) if by_chunks else None
    if by_chunks:
        init.use_placeholders(model, dtype, CPU)
    else:
        init.initialize(model, 3)
    # One of its states is a copy of the first weights.
    settings = {"optimizer": "madgrad", "sharded": True, "first_weights": chunks}
    return model, step_of(model, dtype, world, **settings)


def _check_first_weights(world: World, config, path):
    """Each rank's shard, read from a file by itself, is its part of the weights that were loaded
    whole.
    """
    steps = []
    for by_chunks in (False, True):
        with init.uninitialized() if by_chunks else CPU:
            model = model_of(config, seed=None)
        checksum, chunks = Checksum(), None
        if by_chunks:
            chunks, loaded = chunks_of(model, path, 3, True, checksum)
            init.use_placeholders(model, torch.bfloat16, CPU)
        else:
            init.initialize(model, 3)
            expected = load_weights(model, path, True)
        settings = {"sharded": True, "first_weights": chunks}
        steps.append(step_of(model, torch.bfloat16, world, **settings))
    assert same(steps[0].state_dict(), steps[1].state_dict())
    assert loaded == expected
    resume.check_weights(CheckpointConfig(), world, checksum.value)


def _check_ranks(world: World, shape, directory):
    config = BertConfig(**shape)
    if world.size == 2:
        whole, by_chunks = (_step(config, world, chunks) for chunks in (False, True))
        assert same(whole[1].state_dict(), by_chunks[1].state_dict())
        by_chunks[1].optimizer.gather()
        weights_of = [[*model.parameters()] for model, _ in (whole, by_chunks)]
        assert same(*weights_of)
        with torch.no_grad():  # so that each number tells where it belongs
            for key, flat in by_chunks[1].optimizer.parts().items():
                flat.copy_(torch.arange(len(flat)) + world.rank * 0.25 + len(key))
        shard, index = by_chunks[1].shard_state()
        saved = {"shard": shard, "index": index | {"step": 5}}
        _part(world.rank, 2).write(directory, 5, saved, keep=1)
        state = by_chunks[1].state_dict()
        if world.is_main:
            torch.save(state, directory / "whole.pt")
            _save_weights(whole[0], config, directory)
        world.barrier()
    else:
        _check_resumed(world, config, directory)
    for name in ("bare.pt", "unpadded.safetensors", "step_0000000005/index.pt"):
        _check_first_weights(world, config, directory / name)


def _save_weights(model, config, directory):
    """As a bare encoder, and with word embeddings as long as the vocabulary."""
    tensors = {name: p.detach().clone() for name, p in model.state_dict().items()}
    bare = {n: t for n, t in tensors.items() if n.startswith("bert.encoder.")}
    bare |= {n: t for n, t in tensors.items() if ".embeddings." in n}
    bare = {name.removeprefix("bert."): tensor for name, tensor in bare.items()}
    torch.save(bare, directory / "bare.pt")
    tensors[WORDS] = tensors[WORDS][: config.vocab_size].clone()
    safetensors.torch.save_file(tensors, directory / "unpadded.safetensors")


def _check_resumed(world: World, config, directory):
    model, step = _step(config, world, True)
    saved = load_newest(CheckpointConfig(directory=directory, resume=True))
    assert saved["step"] == 5
    step.load_state_dict(saved)
    state = step.state_dict()
    expected = torch.load(directory / "whole.pt", weights_only=True)
    step.optimizer.gather()
    if world.is_main:
        assert same(state, expected)
    masters = expected["optimizer"]["masters"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name].bfloat16()), name


def test_parts_of_two_ranks_and_weights_of_a_file_are_read_by_any_ranks_each_its_own_as_if_whole(
    tiny, tmp_path
):
    shape = {name: getattr(tiny, name) for name in tiny.__dataclass_fields__}
    run_ranks(_check_ranks, 2, 3, 1, arguments=(shape, tmp_path))


def test_weights_drawn_in_chunks_are_those_drawn_at_once(tiny, monkeypatch):
    # Of 24 x 24 and 24 x 40 numbers; 216 x 24 leaves no rest, 3 x 24 a short one.
    monkeypatch.setattr(init, "CHUNK_SIZE", 48)
    with init.uninitialized():
        model = model_of(tiny, seed=None)
    unset = float("nan")
    found = {n: torch.full(p.shape, unset) for n, p in model.named_parameters()}
    for name, start, values in init.first_weights(model, 11):
        found[name].view(-1)[start : start + len(values)] = values
    generator = torch.Generator().manual_seed(11)
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            expected = torch.empty(module.weight.shape)
            expected.normal_(0.0, tiny.initializer_range, generator=generator)
            if name.endswith("word_embeddings"):
                expected[tiny.vocab_size :] = 0
            assert torch.equal(found[f"{name}.weight"], expected), name
        elif isinstance(module, torch.nn.LayerNorm):
            assert (found[f"{name}.weight"] == 1).all()
    for name, values in found.items():
        if name.endswith("bias"):
            assert (values == 0).all(), name


def _state(value):
    parts = {"masters": torch.full((3,), value)}
    optimizer = {"num_steps": 1, "shapes": {"w": (3,)}}
    shard = {"parts": parts, "segments": [("w", 0, 0, 3)]}
    return {"shard": shard, "index": {"optimizer": optimizer}}


def _newest(folder):
    saved = load_newest(CheckpointConfig(directory=folder, resume=True))
    return saved and saved["model"]["w"].tolist()


def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(
    tmp_path, monkeypatch
):
    _part(0, 1).write(tmp_path, 1, _state(1.0), keep=2)
    stands = lambda state, file: (file.write(b"half"), time.sleep(900))  # noqa: E731
    pid = os.fork()
    if pid == 0:  # killed in the middle of its file
        monkeypatch.setattr(sharded.torch, "save", stands)
        try:
            _part(0, 1, token=8).write(tmp_path, 2, _state(2.0), keep=2)
        finally:
            os._exit(1)
    wait_until(lambda: list(tmp_path.glob(".step_*/.rank_*.partial")))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert list(tmp_path.glob(".step_*/.rank_*.partial"))
    assert _newest(tmp_path) == [1.0] * 3
    _part(0, 1, token=9).write(tmp_path, 2, _state(3.0), keep=1)
    assert _newest(tmp_path) == [3.0] * 3
    # Nothing is left of the killed one.
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000002"]


def test_a_part_that_fails_or_never_comes_is_no_checkpoint(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(sharded.torch, "save", full)
        with pytest.raises(OSError, match="disk full"):
            _part(1, 2).write(tmp_path, 1, _state(1.0), keep=2)
    with pytest.raises(sharded.ShardError, match="rank 1: disk full"):
        _part(0, 2).write(tmp_path, 1, _state(1.0), keep=2)
    lonely = _part(0, 2)
    lonely.abandoned.set()
    with pytest.raises(sharded.ShardError, match="ended before rank 1 had written"):
        lonely.write(tmp_path, 1, _state(1.0), keep=2)
    assert list(tmp_path.iterdir()) == []
    assert _newest(tmp_path) is None


@pytest.mark.slow
def test_a_sharded_run_that_is_interrupted_continues_bit_for_bit(
    prepared, run_bert, tmp_path
):
    def run(name, **settings):
        common = {"SHARD_OPTIMIZER": "1", "MAX_STEPS": "4"}
        common |= {"EVAL_ITER_SAMPLES": "0", "TARGET_MLM_ACCURACY": "0"}
        place = folders(tmp_path, name)
        done = run_bert(prepared | common | place | settings, ranks=2)
        assert done.returncode == 0, done.stderr

    run("whole")
    run("parts", CHECKPOINT_SHARDS="1", STEPS_THIS_RUN="2")
    run("parts", CHECKPOINT_SHARDS="1", RESUME="1")
    (path,) = saved_checkpoints(tmp_path / "parts")[-1:]
    path = path.parent
    assert path.name == "step_0000000004"
    written = sorted(file.name for file in path.iterdir())
    assert written == ["index.pt", "rank_00000.pt", "rank_00001.pt"]
    expected = torch.load(tmp_path / "whole" / "step_0000000004.pt", weights_only=True)
    found = sharded.read(path)
    for part in ("masters", "first_moments", "second_moments"):
        assert same(dict(found["optimizer"][part]), expected["optimizer"][part])
    weights = CheckpointConfig(init_checkpoint=tmp_path / "parts").init_checkpoint
    assert same(dict(read_state_dict(weights)), expected["model"])
    resolved = json.loads((tmp_path / "run_parts" / "config.json").read_text())
    assert resolved["checkpoint"]["shards"]


def test_heads_that_a_sharded_checkpoint_lacks_are_drawn(tiny, monkeypatch):
    parameters = dict(model_of(tiny, seed=1).named_parameters())
    heads = {n for n in parameters if n.startswith(("bert.pooler.", "cls.seq_"))}
    kept = {name: parameters[name] for name in parameters.keys() - heads}
    shapes = {name: parameter.shape for name, parameter in kept.items()}
    spans = [(name, 0, p.detach().reshape(-1)) for name, p in kept.items()]
    without = sharded.ShardedTensors(shapes, spans)
    monkeypatch.setattr(weights, "read_state_dict", lambda *_: without)
    model = model_of(tiny, seed=2)
    chunks, loaded = chunks_of(model, Path("index.pt"), 3, True, Checksum())
    assert {chunk.name for chunk in chunks} == parameters.keys()
    assert set(loaded.new) == heads
