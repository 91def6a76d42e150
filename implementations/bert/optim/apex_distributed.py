"""``OPTIMIZER=apex_distributed_lamb`` (experimental): apex.contrib's DistributedFusedLAMB.

Experimental, because it has been run against a double of apex only, never yet against the real one.

The optimizer of NVIDIA's submissions sums the gradients over the ranks, clips them and divides the state over the GPUs
of a node, all by itself; here it is driven through the interface of our own optimizers, and its state is saved in their
form. It takes fp16 weights, and the norm of a weight from them, not from the fp32 master. It needs NGC's PyTorch
(reduce_scatter with no_copy).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from bert.core.dist import World
from bert.core.env import ConfigError
from bert.optim import lamb
from bert.optim.apex import decay_groups, load
from bert.optim.gradients import Clipping, Gradients

NAME = "apex_distributed_lamb"
STATE = {"masters": "_fp32_p", "first_moments": "_fp32_m", "second_moments": "_fp32_v"}
_ALL_GATHER = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
OVERLAPPED_BLOCKS = 4  # parts of the gradient, each of which is reduced when the backward pass has filled it


def check(dtype: torch.dtype, world_size: int) -> None:
    """Raises ConfigError where it cannot run as the settings say."""
    load(NAME)
    if world_size == 1:
        raise ConfigError(f"OPTIMIZER={NAME} divides its state over several GPUs: on one, set OPTIMIZER=apex_lamb")
    if dtype != torch.float16:
        raise ConfigError(f"OPTIMIZER={NAME} takes fp16 weights alone: set PRECISION=fp16, or OPTIMIZER=lamb")
    if "no_copy" not in inspect.signature(distributed.reduce_scatter).parameters:
        raise ConfigError(f"OPTIMIZER={NAME} needs the PyTorch of an NGC image (reduce_scatter with no_copy)")


class DistributedLamb:
    """DistributedFusedLAMB as one of our optimizers; it is the step's Gradients as well."""

    def __init__(
        self,
        model: nn.Module,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: lamb.Config,
        world: World,
        *,
        clipping: Clipping,
        masters: dict[str, Tensor] | None,
        node_size: int,
    ) -> None:
        """``node_size``: ranks on a node, over which the state is divided."""
        named = dict(named_parameters)
        self.forward, self.names, self.parameters = model, list(named), list(named.values())
        self.world, self.clipping = world, clipping
        overlap = clipping.when == "after"
        self.apex = load(NAME)(
            decay_groups(self.names, self.parameters, config.weight_decay),
            lr=0.0,
            bias_correction=True,
            grad_averaging=True,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            max_grad_norm=clipping.max_norm,
            adam_w_mode=True,
            use_nvlamb=config.ratio == "all",
            overlap_reductions=overlap,
            dwu_group_size=node_size,
            # Clipping before the sum is done once a block on the whole gradient: it is right with one block only.
            dwu_num_blocks=OVERLAPPED_BLOCKS if overlap else 1,
            dwu_num_chunks=1,
            dwu_num_rs_pg=1,
            dwu_num_ar_pg=1,
            dwu_num_ag_pg=0,
            fused_norm=True,  # in fp32; the other way takes the norm in fp16
            clip_after_ar=overlap,
            full_ar=world.size > node_size,
        )
        self._initialize(masters)

    def _initialize(self, masters: dict[str, Tensor] | None) -> None:
        """apex lays out its buffers after a first backward pass, in the order of the gradients: here one of zeros."""
        self.apex.set_global_scale(torch.ones(1, device=self.parameters[0].device))
        self.apex._lazy_init_stage1()
        chain = torch.zeros((), dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        for parameter in self.parameters:  # one after the other: the last gradient comes first, as in training
            chain = chain + (parameter * 0).sum()
        chain.backward()
        self.apex._lazy_init_stage2()
        self.zero_grad()
        if masters is not None:  # apex has filled its masters from the fp16 weights
            self._fill("masters", masters)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def gradients(self, model: nn.Module, clipping: Clipping, world: World, find_overflow: bool) -> Gradients:
        """See Optimizer: apex sums and clips by itself, as it was told when it was made."""
        return self

    @contextlib.contextmanager
    def micro_batch(self, first: bool, last: bool, factor: Tensor) -> Iterator[None]:
        """apex's hooks reduce the gradients in the backward pass of the last one (CLIP=after)."""
        self.apex.set_is_accumulation_step(not last)
        yield

    @torch.no_grad()
    def finish(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """A norm that is finite unless apex skips the step, and 1: apex clips and unscales by itself."""
        self.apex.set_global_scale(scale.reshape(1))
        self.apex.complete_reductions()
        norm = self.apex.L2_grad_norm.float().reshape(())
        norm = torch.where(norm + 1 > norm, norm, float("inf"))  # what apex calls finite: below 2^24
        if self.clipping.when == "before":
            norm = self.world.sum(norm)  # each rank has its own; one that overflowed stops all
        return norm, torch.ones_like(norm)

    # --- update ------------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: Tensor | float, grad_scale: Tensor | float = 1.0, keep: Tensor | None = None) -> None:
        """One update; apex itself skips it where the norm is not finite, as ``finish`` said."""
        self.apex._lr.copy_(torch.as_tensor(lr))
        self.apex.step()

    def gather(self) -> None:
        """Makes all weights current on every rank: after a step they are."""

    def mark_stale(self) -> None:
        """Notes that a replayed graph has updated the weights: here nothing follows from that."""

    # --- state -------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> list[Tensor]:
        """Every tensor of this rank that a step changes, weights included."""
        shards = [getattr(self.apex, attribute) for attribute in STATE.values()]
        return [*(p.detach() for p in self.parameters), *shards, self.apex._step]

    def state_dict(self) -> dict[str, Any]:
        """As Sharded's: whole, by parameter name, on the CPU of rank 0; a collective."""
        state: dict[str, Any] = {"num_steps": int(self.apex._step)}
        for key, attribute in STATE.items():
            shard = getattr(self.apex, attribute)
            shards = torch.empty(len(shard) * self.apex._group_size, dtype=shard.dtype, device=shard.device)
            _ALL_GATHER(shards, shard, group=self.apex._ag_pg[0])
            if self.world.is_main:
                flat = joined(shards.cpu(), self._shape())
                state[key] = {
                    name: flat[begin : begin + size].view(self.parameters[index].shape).clone()
                    for index, (name, (begin, size)) in enumerate(zip(self.names, self._places(), strict=True))
                }
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``, weights included. Raises KeyError for a name that is missing."""
        self.apex._step.fill_(int(state["num_steps"]))
        for key in STATE:
            self._fill(key, state[key])
        for name, parameter in zip(self.names, self.parameters, strict=True):
            parameter.copy_(state["masters"][name])

    @torch.no_grad()
    def _fill(self, key: str, values: dict[str, Tensor]) -> None:
        shard = getattr(self.apex, STATE[key])
        flat = torch.zeros(len(shard) * self.apex._group_size, dtype=shard.dtype)
        for name, (begin, size) in zip(self.names, self._places(), strict=True):
            flat[begin : begin + size].copy_(values[name].reshape(-1))
        shard.copy_(part(flat, self._shape(), self.apex._rank_in_group))

    def _places(self) -> list[tuple[int, int]]:
        """(begin, size) in apex's flat buffers, in our order."""
        info = {id(p): one for p, one in zip(self.apex._model_params, self.apex._grads_info, strict=True)}
        return [(info[id(p)]["param_offset"], info[id(p)]["param_grads_size"]) for p in self.parameters]

    def _shape(self) -> tuple[int, int, int]:
        return self.apex._num_blocks, self.apex._num_chunks, self.apex._group_size


def joined(shards: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """apex's flat buffer from the shards of all ranks, end to end. ``shape``: (blocks, chunks of a block, ranks).

    The buffer is cut into blocks, these into chunks, these into one piece a rank; a shard is a rank's pieces.
    """
    blocks, chunks, ranks = shape
    return shards.view(ranks, blocks, chunks, -1).permute(1, 2, 0, 3).reshape(-1)


def part(flat: Tensor, shape: tuple[int, int, int], rank: int) -> Tensor:
    """The shard of ``rank``: joined()'s inverse."""
    blocks, chunks, ranks = shape
    return flat.view(blocks, chunks, ranks, -1)[:, :, rank].reshape(-1)
