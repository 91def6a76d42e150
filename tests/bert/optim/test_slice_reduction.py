"""A slice of the gradient on its way to the shard: what is started when."""

from __future__ import annotations

import pytest
import torch

from bert.optim.gradients import SliceReduction


class _Work:
    """A collective whose result is there only after the wait, as on a real network."""

    def __init__(self, events: list, name: str, output: torch.Tensor, value: float):
        self.events, self.name, self.output, self.value = events, name, output, value
        events.append(f"start {name}")

    def wait(self) -> None:
        self.events.append(f"end {self.name}")
        self.output.fill_(self.value)


class _Mesh:
    """Averages are 2 in the group and 3 over the groups, whatever is sent."""

    def __init__(self, size: int, groups: int) -> None:
        self.size, self.groups, self.events = size, groups, []
        self.world, self.within, self.across = self, "group", "groups"

    def reduce_scatter(self, piece: torch.Tensor, sent: torch.Tensor, to: str) -> _Work:
        assert to == "group"
        return _Work(self.events, "group", piece, 2.0)

    def average(self, piece: torch.Tensor, over: str) -> _Work:
        assert over == "groups"
        self.averaged = piece.clone()
        return _Work(self.events, "groups", piece, 3.0)


def _start(
    size: int, groups: int, held: float = 0.0, dtype: torch.dtype = torch.float32
):
    mesh, target = _Mesh(size, groups), torch.full((4,), held)
    sent = target if size == 1 else torch.full((4 * size,), 9.0)
    return mesh, target, SliceReduction(mesh, sent.to(dtype), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slice_is_averaged_across_groups_only_after_its_group(dtype):
    mesh, target, reduction = _start(2, 2, dtype=dtype)
    assert mesh.events == ["start group"]
    for _ in range(2):  # the second time nothing is left to do
        reduction.start_cross_group()
        assert mesh.events == ["start group", "end group", "start groups"]
    assert mesh.averaged.tolist() == [2.0] * 4
    assert mesh.averaged.dtype == dtype
    reduction.finish()
    assert mesh.events[3:] == ["end groups"]
    assert target.tolist() == [3.0] * 4


def test_without_other_groups_a_slice_is_done_after_its_own():
    mesh, target, reduction = _start(2, 1)
    reduction.finish()
    assert mesh.events == ["start group", "end group"]
    assert target.tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_of_one_begins_across_groups(dtype):
    mesh, target, reduction = _start(1, 2, held=5.0, dtype=dtype)
    assert mesh.events == ["start groups"]
    assert mesh.averaged.tolist() == [5.0] * 4
    reduction.finish()
    assert target.tolist() == [3.0] * 4
