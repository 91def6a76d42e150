"""What one forward pass shares: a seed, numbered sites of dropout, and what is computed once."""

from __future__ import annotations

import torch

from bert.kernels.dropout import ForwardPass

CPU = torch.device("cpu")


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


def test_the_generator_of_the_device_fixes_the_seed():
    seeds = []
    for _ in range(2):
        torch.manual_seed(3)
        seeds.append(_pass().sites.next(0.1).seed)
    assert torch.equal(*seeds)


def test_what_is_made_once_is_made_for_each_key_and_each_pass():
    made = []

    def make() -> torch.Tensor:
        made.append(torch.zeros(1))
        return made[-1]

    forward_pass = _pass()
    assert forward_pass.once("a", make) is forward_pass.once("a", make)
    assert forward_pass.once("b", make) is not forward_pass.once("a", make)
    _pass().once("a", make)
    assert len(made) == 3
