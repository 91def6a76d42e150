"""The ranks as a grid: those of a group divide the optimizer's state among them, and every group has all of it.

Within a group, a node as a rule, gradients are reduce-scattered and weights gathered; across the groups each rank
averages its shard of the gradients with those that have the same one (hybrid sharding; Zhao et al. 2023, arXiv
2304.11277).
"""

from __future__ import annotations

import torch.distributed as distributed
from torch import Tensor

from bert.core.dist import World


class Mesh:
    """size: ranks of a group, which are neighbours; rank: this one's place in its group.

    groups: how many there are; group: the number of this rank's.
    """

    def __init__(self, world: World, size: int) -> None:
        """A collective."""
        assert world.size % size == 0
        self.world, self.size, self.groups = world, size, world.size // size
        self.group, self.rank = divmod(world.rank, size)
        self.within: distributed.ProcessGroup | None = None  # None: all ranks
        self.across: distributed.ProcessGroup | None = None
        if 1 < size < world.size:
            self.within = world.subgroup(range(self.group * size, (self.group + 1) * size))
            self.across = world.subgroup(range(self.rank, world.size, size))

    def reduce_scatter(self, shard: Tensor, gathered: Tensor) -> distributed.Work | None:
        """Starts to average ``gathered`` [size x n] over the group, see World."""
        return self.world.reduce_scatter(shard, gathered, self.within)

    def average(self, shard: Tensor) -> distributed.Work | None:
        """Starts to average a shard over the groups, in place."""
        return self.world.average(shard, self.across)

    def all_gather(self, gathered: Tensor, shard: Tensor) -> distributed.Work | None:
        """Starts to collect the shards of the group in ``gathered``, see World."""
        return self.world.all_gather(gathered, shard, self.within)

    def sum(self, values: Tensor) -> Tensor:
        """Sums a tensor over the shards, in place: the same bits on every rank.

        All-reduces of several groups need not add in the same order; the groups would come apart bit by bit.
        """
        if self.groups == 1:
            return self.world.sum(values)
        if self.size > 1:
            gathered = values.new_empty(self.size, values.numel())
            if work := self.all_gather(gathered.view(-1), values.view(-1)):
                work.wait()
            values.copy_(gathered.sum(0).view_as(values))
        return values
