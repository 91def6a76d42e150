"""What we use of DeepSpeed's ZeRO optimizers beyond their public interface: all of it is in this file.

DeepSpeed's public functions (deepspeed.utils.safe_get_full_fp32_param, ...) give a parameter's state, but not where its
part lies in a flat partition, which our rules need for norms over whole parameters; nor can they refresh the weights
from the masters, or change the loss scale between steps. These attributes are those of the version in
requirements/deepspeed.txt; another version may rename them, which the tests of this folder show.

    of both optimizers     loss_scaler.cur_scale
    stages 1 and 2         optimizer.param_groups, update_lp_params;
                           of a parameter: _hp_mapping ("hp": the fp32 partition, "lp": the weights)
    stage 3                fp32_partitioned_groups_flat, grad_position, get_param_id, persistent_parameters,
                           _partition_all_parameters, _reassign_or_swap_out_partitioned_parameters;
                           of a parameter: ds_numel; of deepspeed.zero.Init: _convert_to_zero_parameters
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from bert.optim.flat import Segment


class Partition(NamedTuple):
    """A flat fp32 buffer of ZeRO, and the parts of parameters in it."""

    flat: Tensor
    segments: list[Segment]


class Zero:
    """ZeRO's optimizer of stages 1 and 2; parameters lie end to end, cut where a rank's partition ends."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def partitions(self, parameters: Sequence[nn.Parameter], rank: int) -> list[Partition]:
        """Those of this rank; parameters in the model's order."""
        groups = self.optimizer.optimizer.param_groups
        partitions = [Partition(group["params"][0], []) for group in groups]
        for number, parameter in enumerate(parameters):
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:  # this rank has nothing of it
                continue
            # Its place in the partition; lp_fragment_address is that in the parameter.
            in_partition = mapping.get_hp_fragment_address()
            partitions[mapping.param_group_index].segments.append(
                Segment(
                    parameter=number,
                    begin=in_partition.start,
                    size=in_partition.numel,
                    start=mapping.lp_fragment_address.start,
                )
            )
        return partitions

    def publish(self) -> None:
        """Updates the weights of all ranks from the masters, as at the end of ZeRO's step. A collective."""
        self.optimizer.update_lp_params()

    def after_skipped_step(self) -> None:
        """Brings ZeRO into the state that it expects before a forward pass. A collective."""

    def set_loss_scale(self, scale: float) -> None:
        self.optimizer.loss_scaler.cur_scale = scale


class Zero3(Zero):
    """ZeRO's optimizer of stage 3; every parameter is split evenly over the ranks, padded with zeros."""

    def partitions(self, parameters: Sequence[nn.Parameter], rank: int) -> list[Partition]:
        zero = self.optimizer
        partitions = [Partition(flat, []) for flat in zero.fp32_partitioned_groups_flat]
        for number, parameter in enumerate(parameters):
            # All ranks have parts of this size, the last ones partly or wholly padding.
            group, begin, size = zero.grad_position[zero.get_param_id(parameter)]
            start = rank * size
            without_padding = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined]
            if without_padding > 0:
                partitions[group].segments.append(
                    Segment(parameter=number, begin=begin, size=without_padding, start=start)
                )
        return partitions

    def publish(self) -> None:
        self.optimizer._partition_all_parameters()
        for number in range(len(self.optimizer.fp32_partitioned_groups_flat)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(number)
        self.after_skipped_step()

    def after_skipped_step(self) -> None:
        # Small parameters, which stage 3 expects whole after every step; its own skipped step does not gather them.
        if persistent := self.optimizer.persistent_parameters:
            # A method of any partitioned parameter, which takes the whole list.
            persistent[0].all_gather(persistent)


def wrap(optimizer: Any) -> Zero:
    """ZeRO's optimizer, of any stage."""
    is_stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    return Zero3(optimizer) if is_stage_3 else Zero(optimizer)


def partitioner(deepspeed: Any, settings: dict[str, Any]) -> Callable[[nn.Parameter], None]:
    """A function that partitions a parameter over the ranks as stage 3 does; each call is a collective."""
    # An empty module, as only its conversion of single parameters is used.
    init = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=settings)
    return lambda parameter: init._convert_to_zero_parameters([parameter])
