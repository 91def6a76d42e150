"""The kernels of BERT-large on one GPU, each in CUDA graphs that take turns. Prints one JSON line.

attention  every backend on packed rows of Wikipedia's mix of lengths, bf16, with and without dropout. TFLOP/s counts
           two products forward and five backward on the real lengths. padded_sdpa is PyTorch's on one sequence a row.
gemm       the products of a layer, forward and backward, in bf16 and fp8, and what fp8 casts cost, at 24,576 and 49,152
           tokens of random data: zeros run faster, because the chip is limited by power.
lamb       one update of all parameters: the flat Triton passes against torch._foreach. GB/s counts 42 bytes a parameter
           (the gradient twice, masters and moments read twice and written once, parameters written).
layernorm  bias+dropout+residual+LayerNorm, bias+GELU and the embeddings, bf16, dropout 0.1: Triton against PyTorch,
           eager and compiled; for fp8 with the cast inside and with a separate one. GB/s counts each input read once
           and each result written once; the ceiling is this GPU's own copy.
loss       masked-LM cross-entropy, in place, against PyTorch eager and compiled; 10% of the rows have no label. Each
           call copies fresh logits first, which is timed alone and taken off. GB/s: two reads and one write.
constants  tile sizes, warps and programs of each kernel, fastest choice first. The constants stand in the kernels'
           files, one choice for all runs, so that results repeat bit for bit.

usage: python bench/kernels.py attention|gemm|lamb|layernorm|loss|constants [--rows 24] [--repeats 15] [--no-compile]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from lib import Parser, emit, integer
from torch import Tensor
from torch_lib import (
    Call,
    copy_bandwidth,
    device,
    gpu_state,
    graphs_in_turns,
    matmul_ceiling,
    median_milliseconds,
    require_gpu,
    spread,
)

from bert import kernels
from bert.data.synthetic import wikipedia_like_lengths
from bert.kernels import (
    OPERATIONS,
    attention_triton,
    bias_gelu,
    cross_entropy,
    dropout_add_layer_norm,
    fp8_cases,
    fp8_cast,
    fp8_feed_forward,
    lamb,
)
from bert.kernels.attention import candidates
from bert.kernels.cases import Draw
from bert.kernels.dropout import DropoutSites, ForwardPass
from bert.kernels.fp8 import BACKWARD, FORWARD, Target, product
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.optim.rules import is_decayed

LENGTH, HIDDEN, FEED_FORWARD, HEADS, HEAD_SIZE = 512, 1024, 4096, 16, 64
VOCABULARY, PADDED_VOCABULARY = 30_522, 30_528
DROPOUT = 0.1
BETA1, BETA2, EPS, DECAY = 0.60466, 0.85437, 1e-6, 0.1
NUM_SETS = 4  # of inputs
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, device=device(), dtype=torch.bfloat16 if torch.cuda.is_available() else None)


def with_backward(forward: Call, leaves: Callable[[int], Any], upstream: Tensor) -> dict[str, Call]:
    """Forward alone, and forward with backward."""

    def both(number: int) -> object:
        result = forward(number)
        results = result if isinstance(result, tuple) else (result,)
        return torch.autograd.grad(results, leaves(number), [upstream] * len(results))

    return {"forward": forward, "forward+backward": both}


def bandwidths(
    times: dict[str, list[float]], ceiling: float, num_bytes: Callable[[str], float]
) -> dict[str, dict[str, float]]:
    """Microseconds of each with GB/s and its share of a copy's."""
    figures = spread(times)
    for name, figure in figures.items():
        rate = num_bytes(name) / figure["us"] / 1e3
        figure |= {"gb_per_s": round(rate), "share_of_copy": round(rate / ceiling, 3)}
    return figures


def attention_inputs(rows: int, num_sets: int) -> tuple[list[int], Tensor, list[Tensor]]:
    """Lengths of two sequences a row, their offsets, and QKV inputs."""
    lengths = wikipedia_like_lengths(2 * rows, LENGTH, np.random.default_rng(0)).tolist()
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device())
    inputs = [normal(sum(lengths), 3, HEADS, HEAD_SIZE).requires_grad_() for _ in range(num_sets)]
    return lengths, offsets, inputs


def measure_attention(options: argparse.Namespace) -> dict[str, Any]:
    lengths, offsets, inputs = attention_inputs(options.rows, 2)
    shape = (len(lengths), HEADS, LENGTH, HEAD_SIZE)
    q, k, v = (normal(*shape).requires_grad_() for _ in range(3))
    functions: dict[str, Call] = {}
    for dropout in (0.0, DROPOUT):

        def packed(number: int, run: Any, dropout: float = dropout) -> Tensor:
            return run(inputs[number % 2], ForwardPass(offsets, LENGTH), dropout)

        def padded(_: int, dropout: float = dropout) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

        calls = {
            name: with_backward(partial(packed, run=run), lambda n: inputs[n % 2], normal(*inputs[0][:, 0].shape))
            for name, run in candidates(device()).items()
        }
        calls["padded_sdpa"] = with_backward(padded, lambda _: (q, k, v), normal(*shape))
        functions |= {
            f"{name} dropout={dropout:g} {what}": call for name, both in calls.items() for what, call in both.items()
        }
    figures = spread(graphs_in_turns(functions, repeats=options.repeats))
    ceiling = matmul_ceiling()
    real, full = sum(length**2 for length in lengths), len(lengths) * LENGTH**2
    for name, figure in figures.items():
        pairs = (full if name.startswith("padded") else real) * (3.5 if name.endswith("backward") else 1)
        rate = 4 * HEADS * HEAD_SIZE * pairs / figure["us"] / 1e6
        figure |= {"tflop_per_s": round(rate, 1), "share_of_gemm": round(rate / ceiling, 3)}
    sizes = {"tokens": sum(lengths), "sequences": len(lengths), "gemm_tflop_per_s": round(ceiling)}
    return sizes | {"attention": figures}


def unit_target(dtype: torch.dtype) -> Target:
    """A cast with a scale of 1."""
    one = torch.ones((), device=device())
    return Target(dtype=dtype, scale=one, inverse=one, largest=torch.zeros((), device=device()))


def product_rate(m: int, k: int, n: int, kind: str, precision: str) -> float:
    """TFLOP/s of a product as a run does it: the layouts of bf16 operands differ between the three kinds.

    fp8 is without the casts, with fast sums forward ("fp8") or in all ("fp8_fast").
    """
    if precision == "bf16":
        a = normal(k, m).t() if kind == "weight_gradient" else normal(m, k)
        b = normal(n, k).t() if kind == "forward" else normal(k, n)
        return 2 * m * k * n / median_milliseconds(lambda: a @ b) / 1e9
    a_target, b_target = unit_target(FORWARD if kind == "forward" else BACKWARD), unit_target(FORWARD)
    a, _, _ = fp8_cast.cast_transpose(torch.randn(m, k, device=device()), a_target)
    b, _, _ = fp8_cast.cast_transpose(torch.randn(n, k, device=device()), b_target)
    fast = kind == "forward" or precision == "fp8_fast"
    time = median_milliseconds(
        lambda: product(a, b.t(), a_target.inverse, b_target.inverse, None, torch.bfloat16, fast)
    )
    return 2 * m * k * n / time / 1e9


def layer_rates(tokens: int, width: int, inner: int) -> dict[str, Any]:
    """Every product of a layer at one size, the layer as a whole, casts and the transpose within fp8."""
    layers = {
        "qkv": (width, 3 * width),
        "output": (width, width),
        "intermediate": (width, inner),
        "feed_forward_output": (inner, width),
    }
    table: dict[str, Any] = {}
    for precision in ("bf16", "fp8", "fp8_fast"):
        operations = seconds = 0.0
        rates: dict[str, float] = {}
        for name, (inputs, outputs) in layers.items():
            for kind, (m, k, n) in {
                "forward": (tokens, inputs, outputs),
                "input_gradient": (tokens, outputs, inputs),
                "weight_gradient": (outputs, tokens, inputs),
            }.items():
                rate = product_rate(m, k, n, kind, precision)
                rates[f"{name}.{kind}"] = round(rate, 4)
                operations += 2.0 * m * k * n
                seconds += 2.0 * m * k * n / rate
        table[precision] = {"layer": round(operations / seconds, 4), **rates}

    def moved(run: Callable[[], object], num_bytes: int) -> dict[str, float]:
        time = median_milliseconds(run)
        return {"milliseconds": round(time, 4), "terabytes_per_second": round(num_bytes / time / 1e9, 3)}

    into = unit_target(FORWARD)
    table["cast"] = {
        f"{tokens}x{x.shape[1]}": moved(lambda x=x: fp8_cast.cast_transpose(x, into), 4 * x.numel())
        for x in (normal(tokens, columns) for columns in (width, 3 * width, inner))
    }
    narrow, _, _ = fp8_cast.cast_transpose(normal(tokens, width), into)
    table["transpose"] = {f"{tokens}x{width}": moved(lambda: fp8_cast.transpose(narrow), 2 * narrow.numel())}
    return table


def measure_gemm(options: argparse.Namespace) -> dict[str, Any]:
    sizes = [(64, 32, 64)] if options.tiny else [(tokens, HIDDEN, FEED_FORWARD) for tokens in (24_576, 49_152)]
    ceiling = round(matmul_ceiling(), 4)
    return {"ceiling_tflops": ceiling, "tflops": {str(s[0]): layer_rates(*s) for s in sizes}, "clocks": gpu_state()}


def parameter_shapes(num_layers: int) -> dict[str, torch.Size]:
    with torch.device("meta"):
        bound = kernels.select(kernels.Config(fused="none", attention="sdpa_loop"), torch.device("cpu"))
        model = BertForPreTraining(BertConfig(num_hidden_layers=num_layers), bound)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def flat_lamb(shapes: dict[str, torch.Size]) -> Call:
    """The norm of the gradient and the two passes on flat buffers."""
    sizes = [shape.numel() for shape in shapes.values()]
    layout = lamb.make_layout(sizes, [DECAY if is_decayed(name) else 0.0 for name in shapes], device())
    gradient = normal(layout.size, scale=1e-3)
    master, first = (torch.randn(layout.size, device=device()) * scale for scale in (0.02, 1e-3))
    second, low = first.square(), torch.empty_like(gradient)
    scalars = torch.tensor([1e-6, 1.0, 1 / (1 - BETA1), 1 / (1 - BETA2)], device=device())

    def step(_: int) -> None:
        norm = lamb.fused.squared_norm(gradient).sqrt()
        scalars[1] = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        norms = lamb.fused.moments(layout, gradient, master, first, second, scalars, BETA1, BETA2, EPS)
        lamb.fused.update(layout, master, first, second, low, norms, scalars, EPS)

    return step


def foreach_lamb(shapes: dict[str, torch.Size]) -> Call:
    """The same update with torch._foreach operations, tensor by tensor."""
    gradients = [normal(*shape, scale=1e-3) for shape in shapes.values()]
    masters = [torch.randn(shape, device=device()) * 0.02 for shape in shapes.values()]
    low = [gradient.clone() for gradient in gradients]
    first = [torch.randn_like(master) * 1e-3 for master in masters]
    second = [moment.square() for moment in first]
    decayed = [n for n, name in enumerate(shapes) if is_decayed(name)]

    def step(_: int) -> None:
        norm = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).norm()
        scaled = torch._foreach_mul([g.float() for g in gradients], (1.0 / (norm + 1e-6)).clamp(max=1.0))
        torch._foreach_lerp_(first, scaled, 1 - BETA1)
        torch._foreach_mul_(second, BETA2)
        torch._foreach_addcmul_(second, scaled, scaled, 1 - BETA2)
        roots = torch._foreach_div(second, 1 - BETA2)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, EPS)
        updates = list(torch._foreach_div(first, 1 - BETA1))
        torch._foreach_div_(updates, roots)
        chosen = [updates[n] for n in decayed]
        torch._foreach_add_(chosen, [masters[n] for n in decayed], alpha=DECAY)
        norms = torch._foreach_norm([masters[n] for n in decayed])
        torch._foreach_mul_(chosen, torch._foreach_div(norms, torch._foreach_norm(chosen)))
        torch._foreach_add_(masters, updates, alpha=-1e-6)
        torch._foreach_copy_(low, masters)

    return step


def measure_lamb(options: argparse.Namespace) -> dict[str, Any]:
    shapes = parameter_shapes(24)
    count = sum(shape.numel() for shape in shapes.values())
    functions = {"triton": flat_lamb(shapes), "foreach": foreach_lamb(shapes)}
    times = graphs_in_turns(functions, num_calls=3, repeats=options.repeats)
    ceiling = copy_bandwidth()
    step = bandwidths(times, ceiling, lambda _: 42 * count)
    return {"parameters": count, "copy_gb_per_s": round(ceiling), "step": step}


def operation_inputs(name: str, tokens: int, seed: int) -> tuple[Any, ...]:
    """Arguments of a memory-bound operation, floating tensors as bf16 leaves."""
    draw = Draw(device(), seed)
    if name == "dropout_add_layer_norm":
        x, residual = draw.normal(tokens, HIDDEN), draw.normal(tokens, HIDDEN)
        vectors = draw.normal(HIDDEN), draw.normal(HIDDEN)
        made: tuple[Any, ...] = (x, draw.normal(HIDDEN), residual, *vectors, 1e-12, DROPOUT, DropoutSites(device()))
    elif name == "bias_gelu":
        made = draw.normal(tokens, FEED_FORWARD), draw.normal(FEED_FORWARD), "tanh"
    else:
        ids = draw.integers(PADDED_VOCABULARY, tokens)
        ids[draw.integers(100, tokens) < 12] = 103  # 12% of the tokens are one word, as [MASK] is
        places = torch.arange(tokens, dtype=torch.int32, device=ids.device) % LENGTH
        tables = draw.normal(PADDED_VOCABULARY, HIDDEN), draw.normal(LENGTH, HIDDEN), draw.normal(2, HIDDEN)
        vectors = draw.normal(HIDDEN), draw.normal(HIDDEN)
        segments = draw.integers(2, tokens)
        made = (ids, segments, places, *tables, *vectors, 1e-12, DROPOUT, DropoutSites(device()))
    return tuple(
        a.to(torch.bfloat16).requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in made
    )


# Least bytes a token, forward and backward, in bf16.
OPERATION_BYTES = {
    "dropout_add_layer_norm": (3 * 2 * HIDDEN, 6 * 2 * HIDDEN),
    "bias_gelu": (2 * 2 * FEED_FORWARD, 3 * 2 * FEED_FORWARD),
    "embeddings": (2 * 2 * HIDDEN, 2 * 2 * HIDDEN),
}


def with_new_dropout(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with dropout that draws a seed of its own."""
    return tuple(DropoutSites(a.device) if isinstance(a, DropoutSites) else a for a in arguments)


def operation_calls(function: Callable[..., Any], sets: list[tuple[Any, ...]], upstream: Tensor) -> dict[str, Call]:
    return with_backward(
        lambda n: function(*with_new_dropout(sets[n % NUM_SETS])),
        lambda n: [a for a in sets[n % NUM_SETS] if isinstance(a, Tensor) and a.requires_grad],
        upstream,
    )


def measure_layernorm(options: argparse.Namespace) -> dict[str, Any]:
    tokens = options.rows * LENGTH
    ceiling = copy_bandwidth()
    figures: dict[str, Any] = {"tokens": tokens, "copy_gb_per_s": round(ceiling)}
    for name, (forward_bytes, backward_bytes) in OPERATION_BYTES.items():
        module = OPERATIONS[name]
        sets = [operation_inputs(name, tokens, seed) for seed in range(NUM_SETS)]
        example = module.reference(*sets[0])
        upstream = torch.randn_like(example[0] if isinstance(example, tuple) else example)
        variants = {"triton": module.fused, "eager": module.reference}
        if not options.no_compile:
            variants["compile"] = torch.compile(module.reference, dynamic=False)
        functions = {
            f"{variant} {what}": call
            for variant, function in variants.items()
            for what, call in operation_calls(function, sets, upstream).items()
        }
        both = {"forward": forward_bytes, "forward+backward": forward_bytes + backward_bytes}
        times = graphs_in_turns(functions, repeats=options.repeats)
        figures[name] = bandwidths(times, ceiling, lambda key, both=both: tokens * both[key.split()[1]])
    if HAS_FP8:
        functions, least = fp8_calls(tokens)
        times = graphs_in_turns(functions, repeats=options.repeats)
        figures["fp8"] = bandwidths(times, ceiling, lambda key: tokens * least[key])
    return figures


def fp8_calls(tokens: int) -> tuple[dict[str, Call], dict[str, int]]:
    """Kernels with the cast inside and with a separate one, and the transpose within fp8; the least bytes of each."""
    inner, upstream = ([normal(tokens, FEED_FORWARD) for _ in range(NUM_SETS)] for _ in range(2))
    bias = normal(FEED_FORWARD)
    norms = [operation_inputs("dropout_add_layer_norm", tokens, seed) for seed in range(NUM_SETS)]
    forward, backward = (fp8_cases.new_target(dtype, 50.0, device()) for dtype in (FORWARD, BACKWARD))
    narrow = [fp8_cast.cast_transpose(arguments[0].detach(), forward)[0] for arguments in norms]

    def norm_with_cast(number: int) -> object:
        operands = dropout_add_layer_norm.Operands(*norms[number % NUM_SETS][:5])
        return dropout_add_layer_norm.fused_with_cast(operands, 1e-12, DROPOUT, DropoutSites(device()), forward)

    def separate_norm(number: int) -> object:
        result = dropout_add_layer_norm.fused(*with_new_dropout(norms[number % NUM_SETS]))[0]
        return fp8_cast.cast_transpose(result.detach(), forward)

    def separate_backward(number: int) -> object:
        leaves = inner[number % NUM_SETS].detach().requires_grad_(), bias.detach().requires_grad_()
        value = bias_gelu.fused(*leaves, "tanh")
        gradient, _ = torch.autograd.grad(value, leaves, upstream[number % NUM_SETS])
        return fp8_cast.cast_transpose(gradient, backward)

    def gelu_backward(number: int) -> object:
        gradient, x = upstream[number % NUM_SETS], inner[number % NUM_SETS]
        return fp8_feed_forward.gelu_backward_cast(gradient, x, bias, "tanh", backward)

    def gelu_both(number: int) -> object:
        bias_gelu.fused(inner[number % NUM_SETS], bias, "tanh")  # the forward pass counts in both
        return gelu_backward(number)

    def separate_gelu(number: int) -> object:
        return fp8_cast.cast_transpose(bias_gelu.fused(inner[number % NUM_SETS], bias, "tanh"), forward)

    functions: dict[str, tuple[Call, int]] = {
        "gelu, separate cast": (separate_gelu, 8 * FEED_FORWARD),
        "gelu, cast inside": (
            lambda n: fp8_feed_forward.gelu_cast(inner[n % NUM_SETS], bias, "tanh", forward),
            4 * FEED_FORWARD,
        ),
        "gelu forward+backward, separate cast": (separate_backward, 14 * FEED_FORWARD),
        "gelu forward+backward, cast inside": (gelu_both, 10 * FEED_FORWARD),
        "gelu backward, cast inside": (gelu_backward, 6 * FEED_FORWARD),
        "norm, separate cast": (separate_norm, 10 * HIDDEN),
        "norm, cast inside": (norm_with_cast, 7 * HIDDEN),
        "cast": (lambda n: fp8_cast.cast_transpose(inner[n % NUM_SETS], forward), 4 * FEED_FORWARD),
        "transpose": (lambda n: fp8_cast.transpose(narrow[n % NUM_SETS]), 2 * HIDDEN),
    }
    calls = {name: call for name, (call, _) in functions.items()}
    return calls, {name: least for name, (_, least) in functions.items()}


def loss_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and the gradient of the losses."""
    labels = torch.randint(VOCABULARY, (rows,), device=device())
    labels[rows * 9 // 10 :] = cross_entropy.IGNORE
    return normal(rows, PADDED_VOCABULARY, scale=3), labels, torch.rand(rows, device=device()) / rows


def loss_call(loss: Callable[..., Tensor], source: Tensor, labels: Tensor, upstream: Tensor) -> Call:
    """Copies the logits, which ours overwrites, takes the losses and the gradient of the logits."""
    logits = torch.empty_like(source, requires_grad=True)

    def run(_: int) -> object:
        with torch.no_grad():
            logits.copy_(source)
        return torch.autograd.grad(loss(logits, labels, VOCABULARY), logits, upstream)

    return run


def measure_loss(options: argparse.Namespace) -> dict[str, Any]:
    inputs = loss_inputs(options.rows * LENGTH // 6)
    source = inputs[0]
    variants: dict[str, Callable[..., Tensor]] = {"triton": cross_entropy.fused, "eager": cross_entropy.reference}
    if not options.no_compile:
        variants["compile"] = torch.compile(cross_entropy.reference, dynamic=False)
    functions = {name: loss_call(loss, *inputs) for name, loss in variants.items()}
    target = torch.empty_like(source)
    functions["copy"] = lambda _: target.copy_(source)
    times = graphs_in_turns(functions, repeats=options.repeats)
    copies = times.pop("copy")
    alone = {name: [a - b for a, b in zip(spans, copies, strict=True)] for name, spans in times.items()}
    ceiling = copy_bandwidth()
    figures = bandwidths(alone, ceiling, lambda _: 3 * source.numel() * source.element_size())
    return {"masked": len(source), "copy_gb_per_s": round(ceiling), "forward+backward": figures}


class Sweep(NamedTuple):
    """A kernel's module, the names of its constants, the choices, and what makes the call once they are set."""

    module: ModuleType
    constants: tuple[str, ...]
    choices: list[tuple[Any, ...]]
    make: Callable[[], Call]

    def set_to(self, choice: tuple[Any, ...]) -> None:
        for constant, value in zip(self.constants, choice, strict=True):
            setattr(self.module, constant, value)

    def call_with(self, choice: tuple[Any, ...]) -> Call:
        made: list[Call] = []

        def run(number: int) -> object:
            self.set_to(choice)
            if not made:
                made.append(self.make())
            return made[0](number)

        return run


def sweeps(rows: int) -> Iterator[tuple[str, Sweep]]:
    """Every kernel with its choices."""
    tokens = rows * LENGTH

    def attention_call(what: str) -> Call:
        _, offsets, (qkv,) = attention_inputs(rows, 1)
        return with_backward(
            lambda _: attention_triton.attention(qkv, ForwardPass(offsets, LENGTH), DROPOUT),
            lambda _: qkv,
            torch.randn_like(qkv[:, 0]),
        )[what]

    def operation_call(name: str, what: str) -> Call:
        sets = [operation_inputs(name, tokens, seed) for seed in range(NUM_SETS)]
        return operation_calls(OPERATIONS[name].fused, sets, torch.randn_like(sets[0][0]))[what]

    blocks = [
        (attention_triton.Blocks(queries=queries, keys=keys, num_warps=warps, num_stages=stages),)
        for queries, keys, warps in ((64, 64, 4), (128, 64, 8), (64, 128, 8), (128, 128, 8), (32, 64, 4), (64, 32, 4))
        for stages in (2, 3)
    ]
    for name, what in (
        ("FORWARD", "forward"), ("QUERY_GRADIENT", "forward+backward"), ("KEY_GRADIENT", "forward+backward")
    ):  # fmt: skip
        yield f"attention {name}", Sweep(attention_triton, (name,), blocks, partial(attention_call, what))
    yield (
        "dropout_add_layer_norm forward",
        Sweep(
            dropout_add_layer_norm,
            ("BLOCK_ROWS_FORWARD", "NUM_WARPS_FORWARD"),
            [(1, 1), (1, 4), (2, 4), (4, 4), (4, 8), (8, 8)],
            partial(operation_call, "dropout_add_layer_norm", "forward"),
        ),
    )
    yield (
        "dropout_add_layer_norm backward",
        Sweep(
            dropout_add_layer_norm,
            ("BLOCK_ROWS_BACKWARD", "NUM_WARPS_BACKWARD", "PROGRAMS_PER_SM"),
            [(1, 4, 4), (1, 4, 6), (1, 2, 8), (2, 4, 2), (2, 4, 4), (2, 8, 2), (4, 4, 2), (4, 8, 2)],
            partial(operation_call, "dropout_add_layer_norm", "forward+backward"),
        ),
    )
    yield (
        "bias_gelu",
        Sweep(
            bias_gelu,
            ("BLOCK", "BLOCK_ROWS", "NUM_WARPS", "PROGRAMS_PER_SM"),
            list(itertools.product((512, 1024), (2, 4, 8), (4, 8), (3, 5, 8))),
            partial(operation_call, "bias_gelu", "forward+backward"),
        ),
    )
    if HAS_FP8:
        # The kernels that write both orders share their constants.
        constants, tiles = ("BLOCK_ROWS", "BLOCK", "NUM_WARPS"), list(itertools.product((64, 128), (64, 128), (4, 8)))
        for name in ("gelu, cast inside", "gelu backward, cast inside", "cast"):
            yield f"fp8 {name}", Sweep(fp8_cast, constants, tiles, lambda name=name: fp8_calls(tokens)[0][name])
        yield (
            "fp8 transpose",
            Sweep(
                fp8_cast,
                ("TRANSPOSE_BLOCK", "TRANSPOSE_NUM_WARPS"),
                [(64, 2), (64, 4), (128, 4), (128, 8), (256, 8)],
                lambda: fp8_calls(tokens)[0]["transpose"],
            ),
        )
    yield (
        "cross_entropy",
        Sweep(
            cross_entropy,
            ("DEPTH", "LANES", "BLOCK"),
            list(itertools.product((2, 4), (1024, 2048), (2048, 4096, 8192))),
            lambda: loss_call(cross_entropy.fused, *loss_inputs(tokens // 6)),
        ),
    )
    yield (
        "lamb",
        Sweep(
            lamb,
            ("CHUNK", "BLOCK", "NUM_WARPS"),
            list(itertools.product((8192, 16384, 65536), (1024, 2048, 4096), (4, 8))),
            lambda: flat_lamb(parameter_shapes(6)),
        ),
    )


def measure_constants(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of each choice, fastest first; the one in the kernel's file is marked."""
    found: dict[str, Any] = {}
    for name, sweep in sweeps(options.rows):
        if options.only not in name:
            continue
        standing = tuple(getattr(sweep.module, constant) for constant in sweep.constants)
        functions = {repr(choice): sweep.call_with(choice) for choice in [standing, *sweep.choices]}
        figures = spread(graphs_in_turns(functions, num_calls=4, repeats=7))
        sweep.set_to(standing)
        rows = [{"choice": key, "standing": key == repr(standing), **figure} for key, figure in figures.items()]
        found[name] = sorted(rows, key=lambda row: row["us"])
    return found


def main() -> None:
    measures = {
        "attention": measure_attention, "gemm": measure_gemm, "lamb": measure_lamb, "layernorm": measure_layernorm,
        "loss": measure_loss, "constants": measure_constants,
    }  # fmt: skip
    parser = Parser(__doc__)
    parser.add_argument("kernel", choices=list(measures))
    parser.add_argument("--rows", type=integer, default=24, help="rows of 512 tokens (default 24), but for gemm")
    parser.add_argument("--repeats", type=integer, default=15, help="replays of each (default 15)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes a minute)")
    parser.add_argument("--only", default="", help="constants: kernels whose name has this in it")
    parser.add_argument("--tiny", action="store_true", help="gemm: a small size, to try it out on a CPU")
    options = parser.parse_args()
    if not (options.kernel == "gemm" and options.tiny):
        require_gpu()
    figures = measures[options.kernel](options)
    if not figures:
        parser.error(f"--only {options.only}: no such kernel: {', '.join(name for name, _ in sweeps(options.rows))}")
    emit(options.kernel, figures, data="random bf16")


if __name__ == "__main__":
    main()
