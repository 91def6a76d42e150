"""Steps and an evaluation are captured, or not, while one call of a library fails: every one of them
in turn, by the rules of STAND_IN_TORCH. Run where the stand-in GPU is installed.

usage: python every_call.py PRECISION EVERY    of the launches each EVERY-th fails
Prints one line of JSON: numbers of calls and outcomes, and what must never be.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import json
import sys

import stand_in_gpu
import torch

from bert import kernels, optim
from bert.core.dist import DistConfig, World
from bert.data.batch import PretrainingCapacity, make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels.precision import PrecisionConfig
from bert.kernels.support.graph_capture import CaptureError
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import initialize
from bert.training.evaluate import EvaluationConfig, EvaluationGraph
from bert.training.graph import (
    GraphedStep,
    capture_or_warm_up,
    graph_capacity,
    static_batch,
)
from bert.training.step import build_step

GPU = torch.device("cuda", 0)
SMALL = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=48, max_position_embeddings=16)  # fmt: skip


def built(precision):
    choice = kernels.KernelsConfig(fused="none", attention="flash")
    model = BertForPreTraining(SMALL, kernels.bind_kernels(choice, GPU))
    initialize(model, 0)
    model.to(GPU)
    step = build_step(
        model,
        PrecisionConfig(precision=precision).resolve(GPU),
        optim.OptimizerConfig(sharded=False),
        World(DistConfig(device="cuda")),
        accumulate=False,
        fused_update=False,
    )
    return model, step


def batch():
    records = synthetic_records(4, 16, 64, packed=False, seed=1)
    plain = make_batch(records, range(4), 16)
    room = PretrainingCapacity(tokens=64, sequences=6, masked=plain.num_masked + 3)
    return static_batch(plain, graph_capacity(room, 4)).pin_memory()


def trained(take, example):
    losses = []
    for number in range(2):
        torch.manual_seed(number)
        losses += [float(loss) for loss in take([example], 0.01).losses]
    return losses


def attempt(precision, example, fail_at):
    """(outcome, losses, state, calls) of a run whose preparation has a failure."""
    cuda = stand_in_gpu.cuda
    model, step = built(precision)
    torch.manual_seed(9)
    cuda.calls.clear()
    cuda.fail_at, said = fail_at, io.StringIO()
    take = evaluation = ended = None
    try:
        with contextlib.redirect_stderr(said):
            take = capture_or_warm_up(
                step, lambda: [example], graph=True, warm_up=False
            )
        with contextlib.suppress(CaptureError):
            evaluation = EvaluationGraph(EvaluationConfig(), 16, model, GPU)
    except RuntimeError as error:
        ended = str(error)
        assert stand_in_gpu.cuda_rules.INJECTED in ended, ended
        assert "\n" not in ended
    calls, cuda.fail_at = list(cuda.calls), None
    if ended is not None:
        return "ended", None, None, calls
    graphed = isinstance(take, GraphedStep)
    assert ("steps run without a CUDA graph" in said.getvalue()) != graphed
    losses = trained(take, example)
    state = [tensor.clone().cpu() for tensor in step.state_tensors()]
    outcome = "graph" if graphed else "eager"
    return f"{outcome}, evaluation {evaluation is not None}", losses, state, calls


def main():
    precision, every = sys.argv[1], int(sys.argv[2])
    cuda, aborts = stand_in_gpu.cuda, []
    cuda.abort = aborts.append
    example = batch()
    _, step = built(precision)
    torch.manual_seed(9)
    expected = trained(step, example)
    expected_state = [tensor.clone().cpu() for tensor in step.state_tensors()]
    *_, calls = attempt(precision, example, None)
    launches = [n for n, name in enumerate(calls, 1) if name == "launch"]
    others = [n for n, name in enumerate(calls, 1) if name != "launch"]
    outcomes, faults = collections.Counter(), []
    gc.freeze()
    for number in [None, *others, *launches[::every], launches[-1]]:
        outcome, losses, state, _ = attempt(precision, example, number)
        outcomes[outcome] += 1
        gc.collect()
        name = calls[number - 1] if number else "none"
        found = {kind: len(some) for kind, some in cuda.faults().items() if some}
        if aborts or found:
            faults.append([number, name, outcome, found, aborts])
        if losses is not None:
            equal = all(map(torch.equal, state, expected_state))
            if losses != expected or not equal:
                faults.append([number, name, outcome, "other losses or state"])
        for left in (cuda.pools, cuda.open, cuda.host_filters, aborts):
            left.clear()
        cuda.stream = cuda.default
    counts = {"calls": len(others), "launches": len(launches)}
    print(json.dumps(counts | {"outcomes": outcomes, "faults": faults}))


if __name__ == "__main__":
    main()
