"""A slice of the gradient on its way to the shard: its states, and what has happened at each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bert.optim.gradients import SliceReduction, SliceState


class _Work:
    """A collective whose result is there only after the wait, as on a real network."""

    def __init__(self, events: list[str], name: str, output: torch.Tensor, value: float) -> None:
        self.events, self.name, self.output, self.value = events, name, output, value
        events.append(f"start {name}")

    def wait(self) -> None:
        self.events.append(f"end {self.name}")
        self.output.fill_(self.value)


class _Mesh:
    """Averages are 2 in the group and 3 over the groups, whatever is sent."""

    def __init__(self, size: int) -> None:
        self.size, self.events = size, []

    def reduce_scatter(self, piece: torch.Tensor, sent: torch.Tensor) -> _Work:
        return _Work(self.events, "group", piece, 2.0)

    def average(self, piece: torch.Tensor) -> _Work:
        self.averaged = piece.clone()
        return _Work(self.events, "groups", piece, 3.0)


def _start(size: int, held: float = 0.0, sent: Any = torch.float32, **how: bool):
    mesh, target = _Mesh(size), torch.full((4,), held)
    sent = torch.full((4 * size,), 9.0, dtype=sent)
    return mesh, target, SliceReduction(mesh, sent, target, **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slice_is_averaged_across_groups_only_after_its_group(dtype):
    mesh, target, reduction = _start(2, sent=dtype, adds=False, crosses_groups=True)
    assert (reduction.state, mesh.events) == (SliceState.IN_GROUP, ["start group"])
    for _ in range(2):  # the second time nothing is left to do
        reduction.start_cross_group()
        assert reduction.state is SliceState.ACROSS_GROUPS
        assert mesh.events == ["start group", "end group", "start groups"]
    assert mesh.averaged.tolist() == [2.0] * 4
    assert mesh.averaged.dtype == dtype
    reduction.finish()
    assert (reduction.state, mesh.events[3:]) == (SliceState.DONE, ["end groups"])
    assert target.tolist() == [3.0] * 4


def test_without_other_groups_a_slice_is_done_after_its_own():
    mesh, target, reduction = _start(2, adds=False, crosses_groups=False)
    reduction.finish()
    assert (reduction.state, mesh.events) == (SliceState.DONE, ["start group", "end group"])
    assert target.tolist() == [2.0] * 4


def test_a_group_of_one_begins_across_groups():
    mesh, target, reduction = _start(1, held=5.0, adds=False, crosses_groups=True)
    assert (reduction.state, mesh.events) == (SliceState.ACROSS_GROUPS, ["start groups"])
    assert mesh.averaged.tolist() == [5.0] * 4
    reduction.finish()
    assert target.tolist() == [3.0] * 4


@pytest.mark.parametrize(("crosses", "result"), [(False, 7.0), (True, 3.0)])
def test_a_later_micro_batch_is_added_to_what_the_shard_holds_before_groups_are_averaged(
    crosses, result
):
    mesh, target, reduction = _start(2, held=5.0, adds=True, crosses_groups=crosses)
    reduction.start_cross_group()
    if crosses:
        assert mesh.averaged.tolist() == [7.0] * 4
    reduction.finish()
    assert target.tolist() == [result] * 4
