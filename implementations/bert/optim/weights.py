"""The weights of all ranks, gathered bucket by bucket while the forward pass runs."""

from collections.abc import Sequence

import torch
import torch.distributed as distributed
from torch import nn

from bert.optim.layout import Layout
from bert.optim.mesh import Mesh


class WeightBuckets:
    """The weights of all ranks in a flat buffer, of which the parameters are views, and this rank's
    shard of them.

    stages: modules whose calls make up the forward pass, in its order; filled: the parameters have
    values; otherwise the caller fills the shards, which are then gathered.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        stages: Sequence[nn.Module],
        layout: Layout,
        mesh: Mesh,
        *,
        filled: bool = True,
    ) -> None:
        self.layout, self.mesh = layout, mesh
        dtype, device = parameters[0].dtype, parameters[0].device
        # With a group of one both are the same memory.
        self.shard = self.whole = torch.zeros(layout.total, dtype=dtype, device=device)
        if mesh.size > 1:
            self.shard = torch.zeros(
                layout.shard_total, dtype=dtype, device=mesh.world.device
            )
        # From here on the parameters are views of the buffer: what is gathered into it is what they
        # hold.
        views = layout.views(self.whole, parameters)
        with torch.no_grad():
            for parameter, view in zip(parameters, views, strict=True):
                if filled:
                    view.copy_(parameter)
                # Modules and autograd keep their parameter objects.
                parameter.data = view
        # Stale: other ranks' shards have changed since the last gather.
        self.stale = not filled and mesh.size > 1
        # Gathers that nothing has waited for yet, by bucket.
        self.in_flight: dict[int, list[distributed.Work | None]] = {}
        self._gather_in_order_of(stages, parameters)

    def _gather_in_order_of(
        self, stages: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Gathers buckets in the order in which the forward pass needs them; each stage waits for
        its own.
        """
        self.gather_order: list[int] = []
        buckets = self.layout.bucket_of_each()
        bucket_of = dict(zip(map(id, parameters), buckets, strict=True))
        staged: set[int] = set()
        for stage in stages:
            members = {id(p) for p in stage.parameters()} & bucket_of.keys()
            staged |= members
            needed = {bucket_of[member] for member in members}
            # Buckets are numbered in the order of the backward pass: the last one is needed first.
            self.gather_order += sorted(needed - set(self.gather_order), reverse=True)
            stage.register_forward_pre_hook(
                lambda _module, _inputs, needed=needed: self.wait(needed)
            )
        # Buckets that no stage needs come last; start_gather waits for those.
        for number in range(len(self.layout.buckets)):
            if number not in self.gather_order:
                self.gather_order.append(number)
        self.all_in_stages = staged == bucket_of.keys()

    def mark_stale(self) -> None:
        """Notes that ranks have updated their shards."""
        self.stale = self.mesh.size > 1

    def start_gather(self) -> None:
        """Starts gathering the shards of all ranks; the forward pass waits for each bucket when it
        needs it.
        """
        if not self.stale:
            return
        self.stale = False
        for number in self.gather_order:
            self.in_flight[number] = [
                self.mesh.world.all_gather(
                    part.of_whole(self.whole),
                    part.of_shard(self.shard),
                    self.mesh.within,
                )
                for part in self.layout.buckets[number].slices
            ]
        if not self.all_in_stages:
            self.wait()  # no hook would wait for parameters outside of the stages

    def gather(self) -> None:
        """Makes all weights current on every rank. A collective, unless they are current."""
        self.start_gather()
        self.wait()

    def wait(self, buckets: set[int] | None = None) -> None:
        """Waits for the gathers of these buckets; None: of all. On a GPU the stream waits, not the
        host.
        """
        # A stage that runs again, in a later micro-batch, finds nothing to wait for.
        for number in list(self.in_flight) if buckets is None else buckets:
            for work in self.in_flight.pop(number, ()):
                if work is not None:
                    work.wait()
