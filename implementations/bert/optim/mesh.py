"""Hybrid sharding (Zhao et al. 2023, arXiv 2304.11277): every group of ranks shards a full copy of
the state.

Within a group, usually a node, gradients are reduce-scattered and weights gathered; across groups
each rank averages its shard of the gradients with the ranks that have the same shard.
"""

import torch.distributed as distributed
from torch import Tensor

from bert.core.dist import World


class Mesh:
    """size: ranks of a group, numbered consecutively; rank: this one's place in its group.

    groups: their number; group: index of this rank's.
    """

    def __init__(self, world: World, size: int) -> None:
        """Makes this rank's process groups: a collective of the ranks of each."""
        assert world.size % size == 0
        self.world, self.size, self.groups = world, size, world.size // size
        self.group, self.rank = divmod(world.rank, size)
        self.within: distributed.ProcessGroup | None = None  # None: all ranks
        self.across: distributed.ProcessGroup | None = None
        # Consecutive ranks share a node, whose links are fast; ranks with the same shard are
        # ``size`` apart. With groups of 1 or of all, one level is trivial and the other is all
        # ranks.
        if 1 < size < world.size:
            self.within = world.subgroup(
                range(self.group * size, (self.group + 1) * size)
            )
            self.across = world.subgroup(range(self.rank, world.size, size))

    def sum(self, values: Tensor) -> Tensor:
        """Sums a tensor over the shards, in place: the same bits on every rank.

        Not by an all-reduce per group: their orders of summation may differ, and the groups would
        diverge.
        """
        if self.groups == 1:
            return self.world.sum(values)
        if self.size > 1:
            # Gathered, and added in the order of ranks, which is that of every group.
            gathered = values.new_empty(self.size, values.numel())
            if work := self.world.all_gather(
                gathered.view(-1), values.view(-1), self.within
            ):
                work.wait()
            values.copy_(gathered.sum(0).view_as(values))
        return values
