"""Steps and an evaluation are captured, or not, while one call of a library fails: every one of them
in turn, by the rules of STAND_IN_TORCH. Run where the stand-in GPU is installed.

usage: python every_call.py PRECISION EVERY    of the launches each EVERY-th fails
Prints one line of JSON: numbers of calls and outcomes, and what must never be.
"""

import collections
import contextlib
import gc
import io
import json
import re
import sys
from pathlib import Path

import stand_in_gpu
import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from torch_lib import new_model, new_step, packed_batches
from train_step import capacity

from bert.kernels import KernelsConfig
from bert.kernels.precision import PrecisionConfig
from bert.kernels.support.graph_capture import CaptureError
from bert.model.config import BertConfig
from bert.training import graph
from bert.training.evaluate import EvaluationConfig, EvaluationGraph

GPU = torch.device("cuda", 0)
SMALL = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=48, max_position_embeddings=16)  # fmt: skip


def built(precision):
    choice = KernelsConfig(fused="none", attention="flash")
    model = new_model(SMALL, choice).to(GPU)
    return model, new_step(model, PrecisionConfig(precision=precision), sharded=False)


def batch():
    (plain,) = packed_batches(4, 1, SMALL)
    return graph.static_batch(plain, capacity(4, 16)).pin_memory()


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
            take = graph.capture_or_warm_up(step, lambda: [example], graph=True, warm_up=False)  # fmt: skip
        with contextlib.suppress(CaptureError):
            evaluation = EvaluationGraph(EvaluationConfig(), 16, model, GPU)
    except RuntimeError as error:
        ended = str(error)
        assert re.search(r"^[^\n]*injected failure of[^\n]*$", ended), ended
    calls, cuda.fail_at = list(cuda.calls), None
    if ended is not None:
        return "ended", None, None, calls
    graphed = isinstance(take, graph.GraphedStep)
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
