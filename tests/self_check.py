"""What the tests marked gpu check, in short, for a machine without pytest.

Prints a JSON line after each check, with those before it; the last one also has the machine, and
"way_down": the settings that leave out what was found wrong, to be added one at a time from the
first. After an error that the GPU repeats from then on, such as an illegal access, the checks that
are left are "not tested": the first problem of the last one is at fault.

usage: python tests/self_check.py [--tiny]
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The package before this folder's "bert", which is none.
sys.path.insert(1, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "implementations"))
sys.path.insert(1, str(Path(__file__).parent / "bert" / "kernels"))
sys.path.insert(1, str(Path(__file__).parents[1] / "bench"))

import fp8_cases
from fused_cases import CASES, errors_of
from lib import Parser, emit, explain
from torch_lib import (
    TINY,
    device,
    new_model,
    new_step,
    no_fp8,
    packed_batches,
    precisions,
)  # fmt: skip
from train_step import Variant, build_ours, capacity, without

from bert import kernels
from bert.kernels.attention import benchmark
from bert.kernels.fp8 import Scaling
from bert.kernels.fp8.linear import Fp8Linear
from bert.kernels.operations import embeddings
from bert.kernels.precision import PrecisionConfig
from bert.kernels.support import triton_support, weight_gradient
from bert.kernels.support.dropout import DropoutSites
from bert.model.config import BertConfig
from bert.optim import rules
from bert.optim.flat import FlatLamb, ListRule, Shard
from bert.optim.layout import Layout
from bert.training.graph import GraphedStep, static_batch
from bert.training.step import Step


def without_triton() -> bool:
    return not triton_support.supported(device())


def above(limits: float, found: dict[str, float]) -> dict[str, str]:
    """Problems, by name: differences relative to a norm that are larger, or nan."""
    return {
        name: f"differs by {error:.3g} of its norm, above {limits:.3g}"
        for name, error in found.items()
        if not error <= limits
    }


def distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def fused_kernels() -> dict[str, str]:
    """Every fused operation against its reference in fp64, result and gradients; a problem by name of the case."""
    problems: dict[str, str] = {}
    if without_triton():
        return problems
    for name, module in kernels.OPERATIONS.items():
        for case in CASES[name]:
            called = f"{name} {case.name}"
            try:
                worst = max(errors_of(module, case, device()).values())
                problems |= above(case.tolerance, {called: worst})
            except Exception as error:  # one that does not compile is not the end
                problems[called] = explain(error)
    return problems


def fp8_kernels() -> dict[str, str]:
    """The casts against PyTorch's, the casts in kernels against separate ones, and an evaluation
    against training, at BERT-large's sizes.
    """
    if no_fp8() or without_triton():
        return {}
    tokens, width, inner = fp8_cases.LARGE
    found = fp8_cases.differences(device(), tokens, width, inner)
    in_other_order = {fp8_cases.OTHER_ORDER: found.pop(fp8_cases.OTHER_ORDER)}
    evaluated = fp8_cases.evaluation_differences(device(), tokens, width, inner)
    found |= {f"evaluation: {name}": error for name, error in evaluated.items()}
    problems = fp8_cases.cast_problems(device(), tokens, inner)
    problems |= above(fp8_cases.ORDER_TOLERANCE, in_other_order)
    return problems | above(fp8_cases.TOLERANCE, found)


def weight_gradients() -> dict[str, str]:
    """Products that leave the weight's gradient where it is offered, against the same without an offer."""
    options: Any = {"device": device(), "dtype": torch.bfloat16}
    x, upstream = (torch.randn(256, width, **options) for width in (1024, 512))
    weight = torch.randn(512, 1024, **options).requires_grad_()
    runs: dict[str, Callable[[], Tensor]] = {
        "bf16": lambda: weight_gradient.linear(x, weight, None)
    }
    if not no_fp8():
        fp8 = Fp8Linear(Scaling(1, device()), 0)
        runs["fp8"] = lambda: fp8(x, weight, None)
    problems = {}
    for name, run in runs.items():
        place, gradients = torch.full_like(weight, math.nan).detach(), []
        for offered in (None, place):
            weight.grad = None
            weight_gradient.set_grad_buffers([weight], [offered])
            run().backward(upstream)
            gradients.append(weight.grad)
        plain, direct = gradients
        assert plain is not None
        assert direct is not None
        if not torch.equal(plain, direct):
            problems[name] = f"differs by {distance(direct, plain.double()):.3g}"
        elif not weight_gradient.same_memory(direct, place):
            problems[name] = "is copied by autograd"
    return problems


def optimizers() -> dict[str, str]:
    """Three steps of LAMB on flat buffers by the kernels against the rule in fp64."""
    if without_triton():
        return {}
    sizes = {"a.weight": 97, "a.bias": 7, "b.weight": 40_000, "LayerNorm.weight": 64}
    found, expected = (_masters_after_steps(sizes, exact) for exact in (False, True))
    names = [f"lamb {name}" for name in sizes]
    errors = zip(names, map(distance, found, expected), strict=True)
    return above(2e-6, dict(errors))


def _masters_after_steps(sizes: dict[str, int], exact: bool) -> list[Tensor]:
    """In the order of ``sizes``, fp64. exact: by the rule in fp64."""
    config, layout = rules.LambConfig(), Layout(list(sizes.values()), 1, 1 << 20)
    kinds = [torch.float64] * 3 if exact else [torch.float32, *[torch.bfloat16] * 2]
    new = (
        torch.zeros(layout.shard_total, dtype=kind, device=device()) for kind in kinds
    )
    shapes = {name: torch.Size([size]) for name, size in sizes.items()}
    buffers = dict(zip(("masters", "gradient", "weights"), new, strict=True))
    shard = Shard(shapes=shapes, segments=layout.segments(0), **buffers)
    rule: ListRule | FlatLamb = FlatLamb(shard, config)
    if exact:
        rule = ListRule(shard, partial(rules.LambRule, config=config))
    generator = torch.Generator().manual_seed(0)
    for number in range(4):
        for view in shard.views(shard.gradient if number else shard.masters):
            view.copy_(torch.randn(view.shape, generator=generator).bfloat16())
        if number:
            scale = torch.tensor(0.5, device=device())
            update = rules.Update(0.01, scale, None, rule.measure(), lambda sums: sums)
            rule.step(update)
    views = zip(shard.segments, shard.views(shard.masters), strict=True)
    in_order = sorted(views, key=lambda found: found[0].parameter)
    return [view.double() for _, view in in_order]


def sums_and_masks() -> dict[str, str]:
    """The gradient of an embedding table against index_add in fp64, and one mask of dropout in both passes."""
    if without_triton():
        return {}
    rows = torch.randn(9_000, 1024, device=device())
    # Squares: some of them are frequent.
    indices = (torch.randint(0, 500, (9_000,), device=device()) ** 2 // 500).int()
    exact = torch.zeros(500, 1024, dtype=torch.float64, device=device())
    exact.index_add_(0, indices, rows.double())
    error = distance(embeddings.sum_by_index(rows, indices, 500), exact)
    problems = above(1e-6, {"embeddings scatter": error})
    x = torch.ones(4_096, 1024, device=device(), requires_grad=True)
    zero, one = (torch.full((1024,), value, device=device()) for value in (0.0, 1.0))
    operands, rate = (x, zero, torch.zeros_like(x), one, zero), 0.1
    drop = kernels.dropout_add_layer_norm.fused
    stream = drop(*operands, 1e-12, rate, DropoutSites(device()), True)[1]
    (gradient,) = torch.autograd.grad(stream.sum(), x)
    share = (stream == 0).float().mean().item()
    mask = "dropout_add_layer_norm mask"
    if not torch.equal(gradient, stream):
        problems[mask] = "the two passes drop different elements"
    elif not abs(share - rate) <= 1e-3:
        problems[mask] = f"{share:.4f} of the elements are dropped, not {rate}"
    return problems


def whole_step() -> dict[str, str]:
    """Losses and every gradient of a model with all fused kernels, in bf16, against the plain one in fp64."""
    if without_triton():
        return {}
    config = BertConfig(
        num_hidden_layers=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    batch, found = packed_batches(2, 1, config)[0].to(device()), []
    runs = ("auto", "auto", torch.bfloat16), ("none", "sdpa_loop", torch.float64)
    for names, backend, dtype in runs:
        choice = kernels.KernelsConfig(fused=names, attention=backend)
        model = new_model(config, choice).to(device(), dtype)
        loss = sum(model(batch))
        loss.backward()
        named = model.named_parameters()
        gradients = {name: parameter.grad.double() for name, parameter in named}
        found.append((float(loss), gradients))
    (loss, ours), (exact_loss, exact) = found
    problems = {}
    if not abs(loss - exact_loss) <= 0.01 * exact_loss:
        problems["loss"] = f"{loss:.4f}, in fp64 {exact_loss:.4f}"
    whole = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    errors = {}
    for name, gradient in exact.items():
        gap = (ours[name] - gradient).norm()
        errors[name] = float(gap / gradient.norm().clamp(min=1e-3 * whole))
    return problems | above(0.1, errors)


def attention_backends() -> dict[str, str]:
    """Backends that fail, or differ from the oracle."""
    if device().type != "cuda":
        return {}
    trials = benchmark.benchmark_backends(device())
    return {trial.name: trial.problem for trial in trials if trial.problem}


def graphs(tiny: bool = False) -> dict[str, str]:
    """A graphed step leaves all state as it was, and then trains as an eager one; on a CPU only the first part."""
    on_gpu = device().type == "cuda"
    config = BertConfig(num_hidden_layers=2, vocab_size=2048)
    if tiny or not on_gpu:
        config = BertConfig(**TINY)
    room = capacity(4, config.max_position_embeddings)
    batches = [static_batch(batch, room) for batch in packed_batches(4, 4, config)]
    batches = [batch.pin_memory() if on_gpu else batch for batch in batches]

    def stepped(precision: str) -> Step:
        choice = kernels.KernelsConfig(fused="auto" if on_gpu else "none")
        model = new_model(config, choice).to(device())
        fused = "lamb" in choice.names(device())
        numerics = PrecisionConfig(precision=precision)
        return new_step(model, numerics, fused_update=fused, sharded=True)

    def problem_of(precision: str) -> str:
        eager, other = stepped(precision), stepped(precision)
        before = [tensor.clone() for tensor in other.state_tensors()]
        run: Callable[..., Any] = other
        if on_gpu:
            run = GraphedStep(other, batches[:1])
        else:
            with other.rollback():
                other(batches[:1], 1e-3)
        if not all(map(torch.equal, before, other.state_tensors())):
            return "warming up changed the state"
        for number, batch in enumerate(batches):
            losses = []
            for step in (eager, run):
                torch.manual_seed(number)
                losses.append(float(step([batch], 1e-3).losses.mlm))
            if not abs(losses[0] - losses[1]) <= 0.02:
                return f"step {number}: loss {losses[1]:.4f} from the graph, {losses[0]:.4f} without"
        states = before, eager.state_tensors(), other.state_tensors()
        for first, mine, its in zip(*states, strict=True):
            way, gap = ((mine.double() - one.double()).norm() for one in (first, its))
            # Where a gradient is noise the direction of its update is, too.
            if not gap <= 0.5 * way:
                return f"a state is {gap:.3g} from the eager one's, which moved by {way:.3g}"
        return ""

    problems = {}
    for precision in precisions():
        try:
            problems[precision] = problem_of(precision)
        except Exception as error:
            problems[precision] = explain(error)
    return {name: problem for name, problem in problems.items() if problem}


def finite_steps(tiny: bool = False) -> dict[str, str]:
    """The default variant at a real size takes steps whose losses and gradients are finite."""
    config = BertConfig(num_hidden_layers=4)
    if tiny or device().type != "cuda":
        config = BertConfig(**TINY)
    run = build_ours(Variant(name="ours", rows=4), config, packed_batches(4, 2, config))
    problems = {}
    for number in range(2):
        result: Any = run(number)
        found = [float(value) for value in (*result.losses, result.norm)]
        if not (all(map(math.isfinite, found)) and bool(result.finite)):
            problems[f"step {number}"] = f"losses and norm {found}"
    return problems


CHECKS = (
    attention_backends, fused_kernels, fp8_kernels, optimizers, sums_and_masks, whole_step, weight_gradients,
    graphs, finite_steps,
)  # fmt: skip
SIZED = (graphs, finite_steps)
# Each of their problems begins with the operation that is wrong.
ALONE = {"fused_kernels", "optimizers", "sums_and_masks"}
# What leaves out the part that a check found wrong, in the order of docs/train.md.
CURES = {
    "graphs": "CUDA_GRAPH=0",
    "fused_kernels": "FUSED=none",
    "optimizers": "FUSED=none",
    "sums_and_masks": "FUSED=none",
    "whole_step": "FUSED=none",
    "attention_backends": "ATTENTION=sdpa_loop CUDA_GRAPH=0",
    "fp8_kernels": "PRECISION=bf16",
    "weight_gradients": "SHARD_OPTIMIZER=0",
    "finite_steps": "FUSED=none CUDA_GRAPH=0 ATTENTION=sdpa_loop",
}


def way_down(failed: dict[str, dict[str, str]]) -> list[str]:
    """Settings without what failed, the least loss first. failed: the problems by check."""
    cures = [cure for name, cure in CURES.items() if name in failed]
    alone = [problem for name in failed.keys() & ALONE for problem in failed[name]]
    operations = {problem.split()[0] for problem in alone}
    if operations and operations <= set(kernels.FUSABLE):
        cures.insert(cures.index("FUSED=none"), f"FUSED={without(operations)}")
        if "whole_step" not in failed:
            cures = [cure for cure in cures if cure != "FUSED=none"]
    return list(dict.fromkeys(cures))


def lost() -> bool:
    """Whether the GPU only repeats an earlier error."""
    try:
        if device().type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main() -> int:
    parser = Parser(__doc__)
    about = "what runs on a CPU, to try the script out"
    parser.add_argument("--tiny", action="store_true", help=about)
    tiny = parser.parse_args().tiny
    result: dict[str, Any] = {"no_fp8": no_fp8()}
    for number, check in enumerate(CHECKS, start=1):
        try:
            found = check(tiny) if check in SIZED else check()
            result[check.__name__] = found or "ok"
        except Exception as error:
            result[check.__name__] = {"failed": explain(error)}
        emit("self_check", result)  # at once: the next check may run past the limit
        problems = result[check.__name__]
        if problems != "ok" and lost():
            result |= dict.fromkeys((c.__name__ for c in CHECKS[number:]), "not tested")
            first = dict(list(problems.items())[:1])
            result["way_down"] = way_down({check.__name__: first})
            emit("self_check", result)
            return 1
    failed = [name for name, outcome in result.items() if isinstance(outcome, dict)]
    if device().type == "cuda":
        trials = benchmark.benchmark_backends(device())
        result["chosen_attention"] = chosen = benchmark.fastest(trials)
        if chosen is not None:  # of several backends some may fail
            failed = [name for name in failed if name != "attention_backends"]
    result["way_down"] = way_down({name: result[name] for name in failed})
    emit("self_check", result)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
