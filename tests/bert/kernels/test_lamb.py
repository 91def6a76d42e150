"""Flat-buffer LAMB: the Triton passes against plain PyTorch, which optim/test_sharded.py compares with
the optimizer that works by tensor.
"""

import itertools

import pytest
import torch

from bert.kernels.operations import lamb
from bert.optim.rules import squared_norms

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
    """Gradient, master and two moments with zeros between the tensors; the last tensor is 0, so it has no norm."""
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
    moments = master, first, second
    norms = passes.moments(layout, gradient, *moments, scalars, 0.6, 0.85, EPS)
    passes.update(layout, *moments, parameters, norms, scalars, EPS)
    return norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_equal_plain_pytorch_and_again_give_the_same_bits(layout, device, dtype):
    found = []
    for passes in (lamb, lamb, plain_lamb):
        buffers = _buffers(device, dtype=dtype)
        low = torch.full((layout.size,), 7.0, dtype=torch.bfloat16, device=device)
        norms = _step(passes, layout, buffers, _scalars(device), low)
        found.append([norms, *buffers[1:], low])
    ours, again, theirs = found
    assert same(ours, again)
    # Sums of fp32 squares, other order.
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    _, master, first, second, low = ours
    if device.type == "cuda":
        assert torch.equal(low, master.bfloat16())
    else:  # the interpreter cuts bits off where a GPU rounds
        torch.testing.assert_close(low.float(), master, rtol=2**-7, atol=0)
    between = torch.ones(layout.size, dtype=torch.bool)
    for inside in _inside(layout):
        between[inside] = False
    # What lies between the tensors stays zero.
    assert not any(buffer.cpu()[between].any() for buffer in (master, first, second))


LARGEST, LEAST = torch.finfo(torch.bfloat16).max, 2.0**-133  # of bf16


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of these values
@pytest.mark.parametrize(
    ("value", "expected"),
    [(INF, INF), (NAN, NAN), (LARGEST, INF), (LEAST, 0.0), (2.0**-60, 2.0**-120)],
)
def test_a_norm_that_is_not_finite_is_seen_wherever_it_is(value, expected, device):
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
        ours[place][first] = theirs[place][first] = value
        norms = _step(lamb, layout, ours, _scalars(device), None)
        expected = _step(plain_lamb, layout, theirs, _scalars(device), None)
        for a, b in zip([norms, *ours], [expected, *theirs], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert torch.equal(norms[1:], untouched_norms[1:])
        for a, b in zip(ours, untouched, strict=True):
            assert all(torch.equal(a[inside], b[inside]) for inside in others)


def test_shards_that_add_up_their_norms_equal_the_whole(layout, device):
    whole, buffers, scalars = _buffers(device), _buffers(device), _scalars(device)
    _step(lamb, layout, whole, scalars, None)
    units = layout.size // lamb.ALIGNMENT
    borders = [units * i // 3 * lamb.ALIGNMENT for i in range(4)]
    shards, norms = [], 0
    for begin, end in itertools.pairwise(borders):
        spans = [
            [tuple(min(max(place, begin), end) - begin for place in span)]
            for (span,) in layout.spans
        ]
        shard = lamb.spans_layout(end - begin, spans, DECAYS, device)
        views = [buffer[begin:end] for buffer in buffers]
        norms = norms + lamb.moments(shard, *views, scalars, 0.6, 0.85, EPS)
        shards.append((shard, *views[1:]))
    for shard, *views in shards:
        lamb.update(shard, *views, None, norms, scalars, EPS)
    for a, b in zip(buffers[1:], whole[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_factor_that_is_nan_changes_nothing(layout, device):
    buffers, before = _buffers(device), _buffers(device)
    buffers[0][3] = INF  # the overflow that is the reason for skipping
    parameters = buffers[1].bfloat16()
    _step(lamb, layout, buffers, _scalars(device, factor=NAN), parameters)
    assert same(buffers[1:], before[1:])
    assert torch.equal(parameters, before[1].bfloat16())


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
