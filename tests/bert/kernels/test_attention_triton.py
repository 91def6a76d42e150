"""Attention in Triton: context and gradients against the per-sequence loop, with the documented dropout mask."""

import itertools

import pytest
import torch
from torch import Tensor

from bert.kernels.attention import sdpa_loop, triton_attention
from bert.kernels.support import launches
from bert.kernels.support.dropout import Dropout, ForwardPass

from . import philox

# One token, none, a block, and part of a second or third one of queries and keys.
LENGTHS = [5, 1, 35, 16, 0, 17]
PADDING = 3
HEADS = 2
MAX_SEQLEN = 35
SMALL_TILES = launches.Blocks(rows=16, columns=32, num_stages=1)


@pytest.fixture
def small_tiles(monkeypatch) -> None:
    """Blocks of 16 and 32, so that short sequences take several."""
    for name in [name for name in launches.TABLE if name.startswith("attention")]:
        monkeypatch.setitem(launches.TABLE, name, {0: SMALL_TILES})


def _inputs(device, dtype, head_size=16, lengths=LENGTHS, padding=PADDING, heads=HEADS):
    generator = torch.Generator().manual_seed(3)
    offsets = [0, *itertools.accumulate(lengths)]
    num_tokens = offsets[-1] + padding
    qkv = torch.randn(num_tokens, 3, heads, head_size, generator=generator) * 1.5
    upstream = torch.randn(num_tokens, heads, head_size, generator=generator)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    qkv = qkv.to(device, dtype).requires_grad_()
    return qkv, upstream.to(device, dtype), cu_seqlens


def _dropped(qkv: Tensor, cu_seqlens: Tensor, drop: Dropout) -> Tensor:
    """Attention by its definition, in the given precision, with the mask of ``drop``."""
    contexts = []
    num_heads, head_size = qkv.shape[2:]
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        heads = []
        for head in range(num_heads):
            q, k, v = qkv[begin:end, :, head].unbind(1)
            p = torch.softmax(q @ k.T / head_size**0.5, dim=-1)
            mask = philox.keep_pairs(drop, begin, end - begin, head).to(qkv.device)
            heads.append((p * mask * drop.scale) @ v)
        contexts.append(torch.stack(heads, dim=1))
    num_padding = qkv.shape[0] - int(cu_seqlens[-1])
    contexts.append(qkv.new_zeros(num_padding, num_heads, head_size))
    return torch.cat(contexts)


def _expected(exact: Tensor, cu_seqlens: Tensor, drop: Dropout) -> Tensor:
    if drop.seed is None:
        return sdpa_loop(exact, ForwardPass(cu_seqlens, 512), 0.0)
    return _dropped(exact, cu_seqlens, drop)


def _assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    largest = max(1.0, theirs.abs().max().item())
    error = (ours.double() - theirs).abs().max().item() / largest
    assert error < tolerance, error


# fp32 sums of up to 40 terms; in bf16 probabilities and results are rounded to 2^-8, and cut off in
# the interpreter.
@pytest.mark.parametrize(
    ("dtype", "tolerance", "dropout"),
    [
        (torch.float32, 2e-5, 0.0),
        (torch.bfloat16, 3e-2, 0.3),
        pytest.param(torch.float32, 2e-5, 0.3, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 3e-2, 0.0, marks=pytest.mark.slow),
    ],
)
def test_context_and_gradients_equal_the_definition(
    device, small_tiles, dtype, tolerance, dropout
):
    qkv, upstream, cu_seqlens = _inputs(device, dtype)
    exact = qkv.detach().double().requires_grad_()
    torch.manual_seed(4)
    drop = ForwardPass(cu_seqlens, MAX_SEQLEN).sites.next(dropout)
    torch.manual_seed(4)
    forward_pass = ForwardPass(cu_seqlens, MAX_SEQLEN)
    context = triton_attention.attention(qkv, forward_pass, dropout)
    expected = _expected(exact, cu_seqlens, drop)
    context.backward(upstream)
    expected.backward(upstream.double())
    _assert_close(context, expected, tolerance)
    for part in range(3):
        _assert_close(qkv.grad[:, part], exact.grad[:, part], tolerance)
    assert not context[-PADDING:].any(), "padding has no context"
    assert not qkv.grad[-PADDING:].any(), "padding has no gradient"


@pytest.mark.parametrize(
    ("shape", "keys", "tolerances"),
    [  # Any head width is padded to a power of two.
        ({"head_size": 24, "lengths": [19, 3]}, 1, (2e-5, 2e-5)),
        # Keys that score -1000 and +1000: no power of two may overflow, in the last, partial block neither.
        ({"lengths": [21]}, 1000, (1e-3, 1e-2)),
    ],
)  # fmt: skip
def test_odd_widths_and_large_scores(device, small_tiles, shape, keys, tolerances):
    qkv, _, cu_seqlens = _inputs(device, torch.float32, padding=0, **shape)
    qkv.data[:, 1] *= keys
    results = []
    for run, x in ((triton_attention.attention, qkv), (sdpa_loop, qkv.double())):
        leaf = x.detach().requires_grad_()
        context = run(leaf, ForwardPass(cu_seqlens, 21), 0.0)
        context.square().sum().backward()
        results.append([context.detach(), leaf.grad])
    for ours, theirs, tolerance in zip(*results, tolerances, strict=True):
        _assert_close(ours, theirs, tolerance)


def test_tiles_follow_offsets_that_change_in_place(device, small_tiles):
    """As those of a batch that is copied into the same memory do."""
    qkv, _, cu_seqlens = _inputs(device, torch.float32, lengths=[9, 4, 8], padding=0)
    with torch.no_grad():
        for offsets in ([0, 9, 13, 21], [0, 2, 20, 21], [0, 0, 21, 21]):
            cu_seqlens.copy_(torch.tensor(offsets))
            forward_pass = ForwardPass(cu_seqlens, 21)
            context = triton_attention.attention(qkv, forward_pass, 0.0)
            _assert_close(context, sdpa_loop(qkv.double(), forward_pass, 0.0), 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_context_and_gradients_at_real_size(gpu, dropout):
    many = {"lengths": [512, 1, 511, 300, 64, 129, 255] * 8, "heads": 16}
    shape = {"head_size": 64, "padding": 17} | many
    qkv, upstream, cu_seqlens = _inputs(gpu, torch.bfloat16, **shape)
    exact = qkv.detach().double().requires_grad_()
    results = []
    for _ in range(2):
        torch.manual_seed(4)
        qkv.grad = None
        context = triton_attention.attention(qkv, ForwardPass(cu_seqlens, 512), dropout)
        context.backward(upstream)
        results.append((context.detach(), qkv.grad))
    for one, again in zip(*results, strict=True):
        assert torch.equal(one, again)
    torch.manual_seed(4)
    drop = ForwardPass(cu_seqlens, 512).sites.next(dropout)
    expected = _expected(exact, cu_seqlens, drop)
    expected.backward(upstream.double())
    _assert_close(results[0][0], expected, 2e-2)
    _assert_close(results[0][1], exact.grad, 2e-2)
