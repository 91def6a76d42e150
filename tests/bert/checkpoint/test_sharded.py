"""Large models: no rank holds all weights, and each rank writes its part of a checkpoint."""

import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch

from bert.checkpoint import sharded, weights
from bert.checkpoint.huggingface import WORDS
from bert.checkpoint.save import CheckpointConfig, load_newest
from bert.checkpoint.weights import Checksum, chunks_of, load_weights
from bert.model import init
from bert.pretraining import resume

from ...waiting import wait_until
from ..plain import CPU, model_of, step_of
from ..ranks import run_ranks
from ..states import same


def _part(rank, num_ranks, token=7):
    ended = threading.Event()
    return sharded.Part(rank=rank, num_ranks=num_ranks, token=token, abandoned=ended)


def _step(config, world, by_chunks, path=None):
    """(model, step, what was loaded): from first weights, or from those of a file, of which each
    rank reads its part by itself, or all of them.
    """
    with init.uninitialized() if by_chunks else CPU:
        model = model_of(config, seed=None)
    chunks, loaded, checksum = None, None, Checksum()
    if by_chunks:
        chunks = init.first_weights(model, 3)
        if path:
            chunks, loaded = chunks_of(model, path, 3, True, checksum)
        init.use_placeholders(model, torch.bfloat16, CPU)
    else:
        init.initialize(model, 3)
        loaded = load_weights(model, path, True) if path else None
    # One of its states is a copy of the first weights.
    settings = {"optimizer": "madgrad", "sharded": True, "first_weights": chunks}
    step = step_of(model, torch.bfloat16, world, **settings)
    if by_chunks and path:
        resume.check_weights(CheckpointConfig(), world, checksum.value)
    return model, step, loaded


def _both(config, world, path=None):
    """Models and steps, whole and by chunks, which begin alike."""
    whole, by_chunks = (_step(config, world, chunks, path) for chunks in (False, True))
    assert same(*([*step.shard_state()] for _, step, _ in (whole, by_chunks)))
    assert whole[2] == by_chunks[2]
    return whole, by_chunks


def _check_ranks(world, config, directory):
    if world.size == 2:
        (whole, *_), (model, step, _) = _both(config, world)
        step.optimizer.gather()
        assert same([*whole.parameters()], [*model.parameters()])
        with torch.no_grad():  # so that each number tells where it belongs
            for key, flat in step.optimizer.parts().items():
                flat.copy_(torch.arange(len(flat)) + world.rank * 0.25 + len(key))
        shard, index = step.shard_state()
        saved = {"shard": shard, "index": index | {"step": 5}}
        _part(world.rank, 2).write(directory, 5, saved, keep=1)
        state = step.state_dict()
        if world.is_main:
            torch.save(state, directory / "whole.pt")
            _save_weights(whole, config, directory)
        world.barrier()
    else:
        _check_resumed(world, config, directory)
    for name in ("bare.pt", "unpadded.safetensors", "step_0000000005/index.pt"):
        _both(config, world, directory / name)


def _save_weights(model, config, directory):
    """As a bare encoder, and with word embeddings as long as the vocabulary."""
    tensors = {name: p.detach().clone() for name, p in model.state_dict().items()}
    bare = {n: t for n, t in tensors.items() if n.startswith("bert.encoder.")}
    bare |= {n: t for n, t in tensors.items() if ".embeddings." in n}
    bare = {name.removeprefix("bert."): tensor for name, tensor in bare.items()}
    torch.save(bare, directory / "bare.pt")
    tensors[WORDS] = tensors[WORDS][: config.vocab_size].clone()
    safetensors.torch.save_file(tensors, directory / "unpadded.safetensors")


def _check_resumed(world, config, directory):
    model, step, _ = _step(config, world, True)
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


def test_any_number_of_ranks_reads_the_parts_of_two(tiny, tmp_path):
    run_ranks(_check_ranks, 2, 3, 1, arguments=(tiny, tmp_path))


def test_weights_drawn_in_chunks_are_those_drawn_at_once(tiny, monkeypatch):
    # Of 24 x 24 and 24 x 40 numbers: 216 x 24 leaves no rest, 3 x 24 a short one.
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


def test_a_rank_killed_while_it_writes_leaves_the_one_before(tmp_path, monkeypatch):
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
    assert _newest(tmp_path) == [1.0] * 3
    _part(0, 1, token=9).write(tmp_path, 2, _state(3.0), keep=1)
    assert _newest(tmp_path) == [3.0] * 3
    # Nothing is left of the killed one.
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000002"]


def test_a_part_that_fails_or_never_comes_is_no_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        full = mock.Mock(side_effect=OSError("disk full"))
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


def test_heads_that_a_sharded_checkpoint_lacks_are_drawn(tiny, monkeypatch):
    model = model_of(tiny, seed=2)
    parameters = dict(model.named_parameters())
    heads = {n for n in parameters if n.startswith(("bert.pooler.", "cls.seq_"))}
    kept = {name: parameters[name] for name in parameters.keys() - heads}
    shapes = {name: parameter.shape for name, parameter in kept.items()}
    spans = [(name, 0, p.detach().reshape(-1)) for name, p in kept.items()]
    without = sharded.ShardedTensors(shapes, spans)
    monkeypatch.setattr(weights, "read_state_dict", lambda *_: without)
    chunks, loaded = chunks_of(model, Path("index.pt"), 3, True, Checksum())
    assert {chunk.name for chunk in chunks} == parameters.keys()
    assert set(loaded.new) == heads
