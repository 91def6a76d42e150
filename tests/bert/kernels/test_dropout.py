"""Dropout of the fused kernels: the masks are the documented ones, forward and backward, and fair
coins; and what the layers of one forward pass share: a seed, numbered sites of dropout, and what is
computed once.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bert.kernels import OPERATIONS
from bert.kernels.operations.dropout_add_layer_norm import fused
from bert.kernels.support.dropout import Dropout, DropoutSites, ForwardPass

from . import philox
from .fused_cases import CASES

ROWS, WIDTH, P = 13, 97, 0.3


def test_philox_gives_the_published_vectors():
    """Known answers of Random123 for philox4x32 and philox2x32 with 7 and 10 rounds."""
    ones, zeros = [np.array([0xFFFFFFFF])] * 4, [np.array([0])] * 4
    answers = {
        (7, 0): [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        (7, 0xFFFFFFFFFFFFFFFF): [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
        (10, 0): [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        (10, 0xFFFFFFFFFFFFFFFF): [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    }
    for (rounds, seed), words in answers.items():
        found = philox.philox(seed, ones if seed else zeros, rounds)
        assert [int(word[0]) for word in found] == words
    pairs = {
        (7, 0, 0, 0): [0x257A3673, 0xCD26BE2A],
        (7, 0x13198A2E, 0x243F6A88, 0x85A308D3): [0xBEDBBE6B, 0xE4C770B3],
        (10, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF): [0x2C3F628B, 0xAB4FD7AD],
    }
    for (rounds, key, *counter), words in pairs.items():
        found = philox.philox2(
            np.uint64(key), [np.array([word]) for word in counter], rounds
        )
        assert [int(word[0]) for word in found] == words


@pytest.fixture
def drop(device) -> Dropout:
    """The dropout that the first call of the next pass will draw: same generator state, same
    site.
    """
    torch.manual_seed(11)
    expected = DropoutSites(device).next(P)
    torch.manual_seed(11)
    return expected


def test_layer_norm_drops_the_documented_elements_forward_and_backward(device, drop):
    ours = CASES["dropout_add_layer_norm"][0].arguments(device)[:5]
    theirs = [a.detach().double().requires_grad_() for a in ours]
    mask = philox.keep_rows(drop, ROWS, WIDTH).to(device)
    assert mask.float().mean().item() == pytest.approx(1 - P, abs=0.05)
    x, bias, residual, weight, norm_bias = theirs
    expected = F.layer_norm(
        residual + (x + bias) * mask * drop.scale, (WIDTH,), weight, norm_bias, 1e-12
    )
    result, _ = fused(*ours, 1e-12, P, DropoutSites(device))
    upstream = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)).to(
        device
    )
    result.backward(upstream)
    expected.backward(upstream.double())
    torch.testing.assert_close(
        result.detach().double(), expected.detach(), atol=2e-5, rtol=0
    )
    for a, b in zip(ours, theirs, strict=True):
        # Sums of 13 rows.
        torch.testing.assert_close(a.grad.double(), b.grad, atol=5e-5, rtol=0)


def test_embeddings_drop_the_documented_elements_forward_and_backward(device, drop):
    module = OPERATIONS["embeddings"]
    ids, segments, places, *tables = CASES["embeddings"][0].arguments(device)[:8]
    exact = [table.detach().double().requires_grad_() for table in tables]
    num_rows, width = len(ids), tables[0].shape[1]
    mask = philox.keep_rows(drop, num_rows, width).to(device)
    expected = (
        module.reference(
            ids, segments, places, *exact, 1e-12, 0.0, DropoutSites(device)
        )
        * mask
        * drop.scale
    )
    result = module.fused(
        ids, segments, places, *tables, 1e-12, P, DropoutSites(device)
    )
    upstream = torch.randn(
        num_rows, width, generator=torch.Generator().manual_seed(2)
    ).to(device)
    result.backward(upstream)
    expected.backward(upstream.double())
    torch.testing.assert_close(
        result.detach().double(), expected.detach(), atol=2e-5, rtol=0
    )
    for a, b in zip(tables, exact, strict=True):
        # Sums of up to 37 rows.
        torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-4, rtol=0)


@pytest.mark.gpu
def test_every_replay_of_a_graph_drops_other_elements_and_a_seed_repeats_them(gpu):
    x = torch.ones(64, 1024, device=gpu)
    zeros, ones = torch.zeros(1024, device=gpu), torch.ones(1024, device=gpu)

    def one_pass() -> torch.Tensor:
        return fused(
            x, zeros, zeros.expand(64, 1024), ones, zeros, 1e-12, P, DropoutSites(gpu)
        )[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        one_pass()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = one_pass()
    replays = []
    for seed in (None, None, 5, 5):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        replays.append(output.clone())
    assert not torch.equal(replays[0], replays[1])
    assert torch.equal(replays[2], replays[3])
    torch.manual_seed(5)
    assert torch.equal(one_pass(), replays[2]), (
        "a replay draws the seed that an eager pass draws"
    )


def test_the_generator_fixes_every_mask_of_a_pass_and_sites_differ(device):
    arguments = CASES["dropout_add_layer_norm"][0].arguments(device)[:5]

    def one_pass(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        sites = DropoutSites(device)
        return [fused(*arguments, 1e-12, P, sites)[0] for _ in range(2)]

    first, again, other = one_pass(1), one_pass(1), one_pass(2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_a_part_of_a_pass_that_is_run_again_from_its_site_has_the_same_masks(device):
    """What recomputation of activations does."""
    arguments = CASES["dropout_add_layer_norm"][0].arguments(device)[:5]
    sites = DropoutSites(device)

    def part() -> list[torch.Tensor]:
        return [fused(*arguments, 1e-12, P, sites)[0] for _ in range(2)]

    part()
    begin = sites.num_sites
    first, end = part(), sites.num_sites
    sites.num_sites = begin
    assert all(torch.equal(a, b) for a, b in zip(first, part(), strict=True))
    assert sites.num_sites == end == 4


def test_no_dropout_takes_no_random_numbers(device):
    arguments = CASES["dropout_add_layer_norm"][0].arguments(device)[:5]
    state = torch.cuda.get_rng_state if device.type == "cuda" else torch.get_rng_state
    before = state()
    sites = DropoutSites(device)
    fused(*arguments, 1e-12, 0.0, sites)
    assert sites.num_sites == 0
    assert torch.equal(state(), before)


def _mask(
    form: str, site: int, probability: float, size: int = 1024, head: int = 0
) -> torch.Tensor:
    drop = Dropout(
        torch.tensor([0x1234_5678_9ABC_DEF]), site, round(probability * 2**15), 1.0
    )
    return (
        philox.keep_rows(drop, size, size)
        if form == "rows"
        else philox.keep_pairs(drop, 7, size, head)
    )


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("form", ["rows", "pairs"])
def test_masks_are_fair_and_neighbours_independent(form, probability):
    """Rates of the mask and of agreement with its neighbours, each within five standard errors."""
    masks = [_mask(form, site, probability) for site in (0, 1)]
    num_rows, num_columns = masks[0].shape
    true = round(probability * 2**15) / 2**15
    kept = masks[0].double() - (1 - true)
    variance = true * (1 - true)
    assert abs(kept.mean().item()) < 5 * (variance / kept.numel()) ** 0.5
    assert (
        abs((kept.mean(dim=0) ** 2).mean().item() / (variance / num_rows) - 1)
        < 5 * (2 / num_columns) ** 0.5
    )
    assert (
        abs((kept.mean(dim=1) ** 2).mean().item() / (variance / num_columns) - 1)
        < 5 * (2 / num_rows) ** 0.5
    )
    other = masks[1].double() - (1 - true)
    pairs = {"site": (kept, other)} | {
        f"{axis} {lag}": (kept.roll(lag, axis), kept)
        for axis in (0, 1)
        for lag in (1, 2, 3, 4, 8, 16, 24, 64, 128)
    }
    if form == "pairs":
        pairs["head"] = (
            kept,
            _mask(form, 0, probability, head=1).double() - (1 - true),
        )
        pairs["the other way"] = (kept, kept.T)
    for name, (a, b) in pairs.items():
        correlation = (a * b).mean().item() / variance
        assert abs(correlation) < 5 / kept.numel() ** 0.5, name


@pytest.mark.parametrize("probability", [0.1, 0.3, 1e-9, 1 - 1e-9])
def test_survivors_are_scaled_by_the_exact_inverse_of_the_share_that_is_kept(
    probability,
):
    drop = DropoutSites(torch.device("cpu")).next(probability)
    assert abs(drop.threshold / 2**15 - probability) <= 2**-15
    assert drop.scale * (2**15 - drop.threshold) == pytest.approx(2**15, rel=1e-15)


# --- a forward pass
# ---------------------------------------------------------------------------------------------------


def _pass() -> ForwardPass:
    return ForwardPass(torch.tensor([0, 3, 5], dtype=torch.int32), 3)


def test_a_forward_pass_draws_one_seed_and_every_pass_another():
    seeds = []
    for _ in range(2):
        sites = _pass().sites
        drops = [sites.next(0.1) for _ in range(3)]
        assert [drop.site for drop in drops] == [0, 1, 2]
        assert drops[0].seed is drops[2].seed
        seeds.append(int(drops[0].seed.item()))
    assert seeds[0] != seeds[1]


def test_once_computes_once_per_key_and_pass():
    made = []

    def make() -> torch.Tensor:
        made.append(torch.zeros(1))
        return made[-1]

    forward_pass = _pass()
    assert forward_pass.once("a", make) is forward_pass.once("a", make)
    assert forward_pass.once("b", make) is not forward_pass.once("a", make)
    _pass().once("a", make)
    assert len(made) == 3
