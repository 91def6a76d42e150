"""Dropout of the fused kernels: the masks are the documented ones in both passes, and fair coins; and
what the layers of a forward pass share.
"""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bert.kernels import OPERATIONS
from bert.kernels.operations.dropout_add_layer_norm import fused
from bert.kernels.support.dropout import Dropout, DropoutSites, ForwardPass

from ..states import same
from . import philox
from .fused_cases import CASES

ROWS, WIDTH, P = 13, 97, 0.3


ONES = 0xFFFFFFFF
VECTORS = [  # Random123's known answers: function, key, counter, rounds, words
    (philox.philox, 0, [0] * 4, 7, 0x5F6FB709_0D893F64_4F121F81_4F730A48),
    (philox.philox, 2**64 - 1, [ONES] * 4, 10, 0x408F276D_41C83B0E_A20BC7C6_6D5451FD),
    (philox.philox2, np.uint64(0x13198A2E), [0x243F6A88, 0x85A308D3], 7, 0xBEDBBE6B_E4C770B3),
    (philox.philox2, np.uint64(ONES), [ONES] * 2, 10, 0x2C3F628B_AB4FD7AD),
]  # fmt: skip


@pytest.mark.parametrize(("function", "key", "counter", "rounds", "words"), VECTORS)
def test_philox_gives_the_published_vectors(function, key, counter, rounds, words):
    found = function(key, [np.array([word]) for word in counter], rounds)
    assert "".join(f"{int(word[0]):08X}" for word in found) == f"{words:X}"


@pytest.fixture
def drop(device) -> Dropout:
    """What the first call of the next pass will draw."""
    torch.manual_seed(11)
    expected = DropoutSites(device).next(P)
    torch.manual_seed(11)
    return expected


def _same_backward(ours, theirs, result, expected, atol) -> None:
    """That results, and gradients of what they are of, are close to those in fp64."""
    generator = torch.Generator().manual_seed(2)
    upstream = torch.randn(result.shape, generator=generator).to(result.device)
    result.backward(upstream)
    expected.backward(upstream.double())
    close = functools.partial(torch.testing.assert_close, rtol=0)
    close(result.detach().double(), expected.detach(), atol=2e-5)
    for a, b in zip(ours, theirs, strict=True):
        close(a.grad.double(), b.grad, atol=atol)


def test_layer_norm_drops_the_documented_elements_forward_and_backward(device, drop):
    ours = CASES["dropout_add_layer_norm"][0].arguments(device)[:5]
    theirs = [a.detach().double().requires_grad_() for a in ours]
    mask = philox.keep_rows(drop, ROWS, WIDTH).to(device)
    assert mask.float().mean().item() == pytest.approx(1 - P, abs=0.05)
    x, bias, residual, weight, norm_bias = theirs
    dropped = residual + (x + bias) * mask * drop.scale
    expected = F.layer_norm(dropped, (WIDTH,), weight, norm_bias, 1e-12)
    result, _ = fused(*ours, 1e-12, P, DropoutSites(device))
    _same_backward(ours, theirs, result, expected, 5e-5)  # sums of 13 rows


def test_embeddings_drop_the_documented_elements_forward_and_backward(device, drop):
    module = OPERATIONS["embeddings"]
    ids, segments, places, *tables = CASES["embeddings"][0].arguments(device)[:8]
    exact = [table.detach().double().requires_grad_() for table in tables]
    num_rows, width = len(ids), tables[0].shape[1]
    mask = philox.keep_rows(drop, num_rows, width).to(device)
    given, sites = (ids, segments, places), DropoutSites(device)
    whole = module.reference(*given, *exact, 1e-12, 0.0, sites)
    expected = whole * mask * drop.scale
    result = module.fused(*given, *tables, 1e-12, P, DropoutSites(device))
    _same_backward(tables, exact, result, expected, 1e-4)  # of up to 37 rows


@pytest.fixture
def part(device):
    """part(sites): two layers of a pass with dropout."""
    arguments = CASES["dropout_add_layer_norm"][0].arguments(device)[:5]
    return lambda sites: [fused(*arguments, 1e-12, P, sites)[0] for _ in range(2)]


def test_seed_and_site_fix_each_mask_also_where_a_part_runs_again(part, device):
    def one_pass(seed):
        torch.manual_seed(seed)
        sites = DropoutSites(device)
        return part(sites), sites

    (first, sites), (again, _), (other, _) = map(one_pass, (1, 1, 2))
    assert same(first, again)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    later = part(sites)
    sites.num_sites = 2  # as recomputation of activations does
    assert same(later, part(sites))
    assert sites.num_sites == 4


def test_no_dropout_takes_no_random_numbers(device):
    arguments = CASES["dropout_add_layer_norm"][0].arguments(device)[:5]
    state = torch.cuda.get_rng_state if device.type == "cuda" else torch.get_rng_state
    before = state()
    sites = DropoutSites(device)
    fused(*arguments, 1e-12, 0.0, sites)
    assert sites.num_sites == 0
    assert torch.equal(state(), before)


SIZE = 512


def _mask(form: str, site: int, probability: float, head: int = 0) -> torch.Tensor:
    """Of as many rows as columns."""
    seed = torch.tensor([0x1234_5678_9ABC_DEF])
    drop = Dropout(seed, site, round(probability * 2**15), 1.0)
    if form == "rows":
        return philox.keep_rows(drop, SIZE, SIZE)
    return philox.keep_pairs(drop, 7, SIZE, head)


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("form", ["rows", "pairs"])
def test_masks_are_fair_and_neighbours_independent(form, probability):
    """Rates of the mask and of agreement with its neighbours, each within five standard errors."""
    true = round(probability * 2**15) / 2**15
    variance = true * (1 - true)

    def centred(site: int, head: int = 0) -> torch.Tensor:
        return _mask(form, site, probability, head).double() - (1 - true)

    kept = centred(0)
    assert abs(kept.mean().item()) < 5 * (variance / kept.numel()) ** 0.5
    for axis in (0, 1):
        spread = (kept.mean(dim=axis) ** 2).mean().item() / (variance / SIZE)
        assert abs(spread - 1) < 5 * (2 / SIZE) ** 0.5
    pairs = {"site": (kept, centred(1))} | {
        f"{axis} {lag}": (kept.roll(lag, axis), kept)
        for axis in (0, 1)
        for lag in (1, 2, 3, 4, 8, 16, 24, 64, 128)
    }
    if form == "pairs":
        pairs["head"] = kept, centred(0, head=1)
        pairs["the other way"] = (kept, kept.T)
    for name, (a, b) in pairs.items():
        correlation = (a * b).mean().item() / variance
        assert abs(correlation) < 5 / kept.numel() ** 0.5, name


@pytest.mark.parametrize("probability", [0.1, 0.3, 1e-9, 1 - 1e-9])
def test_survivors_are_scaled_by_the_inverse_of_the_share_kept(probability):
    drop = DropoutSites(torch.device("cpu")).next(probability)
    assert abs(drop.threshold / 2**15 - probability) <= 2**-15
    assert drop.scale * (2**15 - drop.threshold) == pytest.approx(2**15, rel=1e-15)


def _pass() -> ForwardPass:
    return ForwardPass(torch.tensor([0, 3, 5], dtype=torch.int32), 3)


def test_a_forward_pass_draws_one_seed_and_every_pass_another():
    drops = [[sites.next(0.1) for _ in range(3)] for sites in (_pass().sites, _pass().sites)]  # fmt: skip
    assert [drop.site for drop in drops[0]] == [0, 1, 2]
    assert drops[0][0].seed is drops[0][2].seed
    assert drops[0][0].seed != drops[1][0].seed


def test_once_computes_once_per_key_and_pass():
    make, forward_pass = object, _pass()
    first = forward_pass.once("a", make)
    assert forward_pass.once("a", make) is first
    assert forward_pass.once("b", make) is not first
    assert _pass().once("a", make) is not first
