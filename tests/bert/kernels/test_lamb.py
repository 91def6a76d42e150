"""Flat-buffer LAMB: the Triton passes against plain PyTorch, and both against the optimizer that
works by tensor.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from bert.kernels.operations import lamb
from bert.optim.rules import LambConfig, LambRule, squared_norms

from ..optim.whole import Whole
from ..states import same
from . import plain_lamb

CHUNK = 4096  # two blocks: as many as needed, since the interpreter is slow
SIZES = [97, 7, CHUNK + 131, 64, 5]
DECAYS = [0.1, 0.0, 0.1, 0.0, 0.1]
EPS = 1e-6
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def layout(device, monkeypatch):
    """Of the tensors above."""
    monkeypatch.setattr(lamb, "CHUNK", CHUNK)
    return plain_lamb.make_layout(SIZES, DECAYS, device)


def _inside(layout, sizes=SIZES):
    begins = [begin for ((begin, _),) in layout.spans]
    return [slice(at, at + size) for at, size in zip(begins, sizes, strict=True)]


def _buffers(device, seed=0, dtype=torch.float32):
    """Gradient, master and two moments with zeros between the tensors; the last tensor is 0, so it
    has no norm.
    """
    generator = torch.Generator().manual_seed(seed)
    layout = plain_lamb.make_layout(SIZES, DECAYS, torch.device("cpu"))
    gradient, master, first, second = (torch.zeros(layout.size) for _ in range(4))
    for inside, size in zip(_inside(layout), SIZES, strict=True):
        gradient[inside] = torch.randn(size, generator=generator)
        if size != SIZES[-1]:
            master[inside] = torch.randn(size, generator=generator)
        first[inside] = torch.randn(size, generator=generator) * 0.1
        second[inside] = torch.rand(size, generator=generator)
    others = (buffer.to(device) for buffer in (master, first, second))
    return [gradient.to(device, dtype), *others]


def _scalars(device, lr=0.01, factor=0.5, step=3, beta1=0.6, beta2=0.85):
    values = [lr, factor, 1 / (1 - beta1**step), 1 / (1 - beta2**step)]
    return torch.tensor(values, dtype=torch.float32, device=device)


def _step(passes, layout, buffers, scalars, parameters):
    gradient, master, first, second = buffers
    betas = 0.6, 0.85
    norms = passes.moments(
        layout, gradient, master, first, second, scalars, *betas, EPS
    )
    passes.update(layout, master, first, second, parameters, norms, scalars, EPS)
    return norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_equal_plain_pytorch(layout, device, dtype):
    ours, theirs = _buffers(device, dtype=dtype), _buffers(device, dtype=dtype)
    empty = torch.empty(layout.size, dtype=torch.bfloat16, device=device)
    low = [empty.clone().fill_(7) for _ in range(2)]
    ours_norms = _step(lamb, layout, ours, _scalars(device), low[0])
    theirs_norms = _step(plain_lamb, layout, theirs, _scalars(device), low[1])
    # Sums of fp32 squares, other order.
    torch.testing.assert_close(ours_norms, theirs_norms, rtol=1e-5, atol=1e-6)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if device.type == "cuda":
        assert torch.equal(low[0], ours[1].bfloat16())
    else:  # the interpreter cuts bits off where a GPU rounds
        torch.testing.assert_close(low[0].float(), ours[1], rtol=2**-7, atol=0)
    between = torch.ones(layout.size, dtype=torch.bool)
    for inside in _inside(layout):
        between[inside] = False
    # What lies between the tensors stays zero.
    assert all(not buffer.cpu()[between].any() for buffer in ours)


LARGEST, LEAST = torch.finfo(torch.bfloat16).max, 2.0**-133  # of bf16


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of these values
@pytest.mark.parametrize(
    ("value", "expected"),
    [(INF, INF), (NAN, NAN), (LARGEST, INF), (LEAST, 0.0), (2.0**-60, 2.0**-120)],
)
def test_a_norm_that_is_not_finite_is_seen_wherever_it_comes_from(
    value, expected, device
):
    for size, place in ((1, 0), (CHUNK + 3, CHUNK + 2), (77, 5)):
        flat = torch.zeros(size, dtype=torch.bfloat16, device=device)
        flat[place] = value
        (found,) = squared_norms([flat]).cpu()
        wanted = torch.tensor(expected).nan_to_num(7.0)
        assert torch.equal(found.nan_to_num(7.0), wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [INF, NAN, LARGEST, LEAST, 0.0])
def test_extreme_values_go_by_the_rule_and_stay_in_their_tensor(value, layout, device):
    untouched = _buffers(device)
    untouched_norms = _step(lamb, layout, untouched, _scalars(device), None)
    first, *others = _inside(layout)
    for place in range(4):  # gradient, master, moments
        ours, theirs = _buffers(device), _buffers(device)
        for buffers in (ours, theirs):
            buffers[place][first] = value
        norms = [
            _step(passes, layout, buffers, _scalars(device), None)
            for passes, buffers in ((lamb, ours), (plain_lamb, theirs))
        ]
        for a, b in zip([norms[0], *ours], [norms[1], *theirs], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert torch.equal(norms[0][1:], untouched_norms[1:])
        for a, b in zip(ours, untouched, strict=True):
            assert all(torch.equal(a[inside], b[inside]) for inside in others)


@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_that_add_up_their_norms_equal_the_whole(layout, device, num_shards):
    whole = _buffers(device)
    _step(lamb, layout, whole, _scalars(device), None)
    buffers = _buffers(device)
    units = layout.size // lamb.ALIGNMENT
    borders = [units * i // num_shards * lamb.ALIGNMENT for i in range(num_shards + 1)]
    shards = []
    for begin, end in itertools.pairwise(borders):
        spans = [
            [tuple(min(max(place, begin), end) - begin for place in span)]
            for (span,) in layout.spans
        ]
        shard = lamb.spans_layout(end - begin, spans, DECAYS, device)
        shards.append((shard, [buffer[begin:end] for buffer in buffers]))
    scalars = _scalars(device)
    norms = sum(
        lamb.moments(shard, *views, scalars, 0.6, 0.85, EPS) for shard, views in shards
    )
    for shard, (_, master, first, second) in shards:
        lamb.update(shard, master, first, second, None, norms, scalars, EPS)
    for a, b in zip(buffers[1:], whole[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("passes", [plain_lamb, lamb], ids=["reference", "fused"])
def test_a_factor_that_is_nan_changes_nothing(layout, device, passes):
    buffers, before = _buffers(device), _buffers(device)
    buffers[0][3] = float("inf")  # the overflow that is the reason for skipping
    parameters = buffers[1].bfloat16()
    _step(passes, layout, buffers, _scalars(device, factor=float("nan")), parameters)
    for a, b in zip(buffers[1:], before[1:], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(parameters, before[1].bfloat16())


@pytest.mark.parametrize("passes", [plain_lamb, lamb], ids=["reference", "fused"])
def test_steps_equal_the_optimizer_that_works_by_tensor(layout, device, passes):
    gradient, master, first, second = _buffers(device)
    first.zero_()
    second.zero_()
    kinds = ["weight" if decay else "bias" for decay in DECAYS]
    names = [f"{number}.{kind}" for number, kind in enumerate(kinds)]
    spans = _inside(layout)
    parameters = [nn.Parameter(master[span].clone()) for span in spans]
    config = LambConfig(beta1=0.6, beta2=0.85, eps=EPS, weight_decay=0.1)
    named = zip(names, parameters, strict=True)
    optimizer = Whole(named, lambda shards: LambRule(shards, config))
    for step in range(1, 4):
        for parameter, span in zip(parameters, spans, strict=True):
            parameter.grad = gradient[span] * step
        optimizer.step(0.01, 0.5)
        buffers = [gradient * step, master, first, second]
        _step(passes, layout, buffers, _scalars(device, step=step), None)
    for parameter, span in zip(parameters, spans, strict=True):
        ours = parameter.detach()
        torch.testing.assert_close(master[span], ours, rtol=1e-5, atol=1e-6)


def test_the_same_input_gives_the_same_bits(layout, device):
    results = []
    for _ in range(2):
        buffers = _buffers(device)
        norms = _step(lamb, layout, buffers, _scalars(device), None)
        results.append([norms, *buffers])
    assert same(*results)


@pytest.mark.gpu
def test_passes_equal_plain_pytorch_at_real_size(gpu):
    """The word embeddings, ten layers' worth of matrices and their biases."""
    sizes = [30_528 * 1024, *[4096 * 1024, 4096] * 20]
    decays = [0.1, *[0.1, 0.0] * 20]
    layout = plain_lamb.make_layout(sizes, decays, gpu)
    generator = torch.Generator(gpu).manual_seed(0)
    inside = torch.zeros(layout.size, device=gpu)
    for span in _inside(layout, sizes):
        inside[span] = 1
    draw = lambda: torch.randn(layout.size, device=gpu, generator=generator)  # noqa: E731
    gradient, master, moment = (draw() * inside for _ in range(3))
    moment *= 1e-3
    start = gradient.bfloat16(), master * 0.02, moment, moment.square()
    results = []
    for passes in (lamb, lamb, plain_lamb):
        buffers = [buffer.clone() for buffer in start]
        low = torch.zeros_like(buffers[0])
        norms = _step(passes, layout, buffers, _scalars(gpu), low)
        results.append([norms, low, *buffers])
    assert same(*results[:2])
    for a, b in zip(results[0], results[2], strict=True):
        rtol = 2**-7 if a.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(a.float(), b.float(), rtol=rtol, atol=1e-7)
