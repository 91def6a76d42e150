"""Micro-batches of fixed size for CUDA graphs: every one of a run fits, and training is unchanged."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bert.core.dist import World
from bert.data.tokens import WordPiece
from bert.training import graph
from finetune import config, tasks, train
from finetune.batches import Order, Room, Samples, Source

from ..bert import no_gpu

# Added to every score of a softmax alike: gradients of 0 but for rounding, which Adam makes steps of.
WITHOUT_GRADIENT = ("key.bias", "layer.1.output.LayerNorm.bias", "qa_outputs.bias")


class Replayed:
    """Stand-in for a CUDA graph without a GPU: repeats the step on the same memory."""

    def __init__(self, run):
        self.replay = run
        run()


def samples_of(lengths):
    sequences = [(np.full(n, 7, dtype=np.int32), 1) for n in lengths]
    return Samples(sequences, {"labels": np.zeros(len(lengths), np.int64)})


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_every_micro_batch_fits_the_size_of_the_largest(
    lengths, batch_size, accumulated, num_steps
):
    samples = samples_of(lengths)
    order = Order(len(lengths), batch_size, accumulated, seed=3, rank=1, world_size=2)
    room = Room.of(samples.lengths, order, num_steps)
    source, plain = (Source(samples, order, 1, room=r, pin=False) for r in (room, None))
    sums = []
    for _ in range(num_steps):
        for filled, batch in zip(source.next_step(), plain.next_step(), strict=True):
            sums.append(batch.num_tokens)
            assert filled.input_ids.shape == (room.capacity.tokens,)
            assert filled.labels.shape == (room.capacity.sequences,)
            assert filled.cu_seqlens[-1] == room.capacity.tokens
            assert filled.max_seqlen == max(lengths) >= int(filled.cu_seqlens.diff().max())
            assert torch.equal(filled.input_ids[: batch.num_tokens], batch.input_ids)
            assert (filled.num_tokens, filled.num_sequences) == (
                batch.num_tokens,
                batch.num_sequences,
            )
    assert max(sums) <= room.capacity.tokens < max(sums) + 16
    assert str(room).startswith(f"{room.capacity.tokens} tokens per micro-batch, ")


@pytest.mark.parametrize(("task_name", "accumulated"), [("squad", 1), ("TSV", 2)])
def test_padded_steps_train_like_those_without_padding(
    task_name, accumulated, squad_environment, tmp_path, monkeypatch
):
    no_gpu.streams(monkeypatch)
    recorded = []
    monkeypatch.setattr(
        graph, "capture", lambda run, *_: recorded.append(Replayed(run)) or recorded[-1]
    )
    environment = squad_environment | {
        "RUN_DIR": str(tmp_path),
        "EPOCHS": "0.4",
        "GRADIENT_STEPS": str(accumulated),
    }
    environment["BATCHSIZE"] = str(12 // accumulated)
    if task_name == "TSV":  # sentences of 1 to 17 words
        for name in ("train", "dev"):
            lines = [
                f"{'the old cat ' * (i % 9)}{'red' if i % 2 else 'here'}\t{i % 2}"
                for i in range(300)
            ]
            (tmp_path / f"{name}.tsv").write_text("\n".join(lines))
        environment |= {"TASK": "TSV", "DATA": str(tmp_path)}
    parameters = []
    for in_graph in (False, True):
        chosen = config.read(environment)
        chosen = dataclasses.replace(chosen, graph=graph.Config(cuda_graph=in_graph))
        world = World(chosen.dist)
        torch.manual_seed(chosen.trial_seed)
        task = tasks.build(chosen, WordPiece(chosen.vocabulary))
        run = train.build(chosen, environment, world, task)
        ending, _ = train.train_on(run, task.train)
        assert ending.step == 10
        parameters.append({name: p.detach().clone() for name, p in run.model.named_parameters()})
        assert len(recorded) == in_graph
    for name, parameter in parameters[0].items():
        if name.endswith(WITHOUT_GRADIENT):
            continue
        torch.testing.assert_close(
            parameters[1][name],
            parameter,
            atol=2e-5,
            rtol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    said = train.report(chosen, environment)
    assert "CUDA graph     " in said
