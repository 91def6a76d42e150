"""The section zero_optimization of a ds_config JSON: what may stand there, the stage, and what it offloads."""

from __future__ import annotations

from typing import Any

from bert.core.env import ConfigError
from bert.deepspeed.ds_values import flag, section

SECTION = "zero_optimization"
# Sizes by which others than all ranks share, with the values that change nothing, and what else would cut, or carry,
# what our rules run on in other ways than partitions.py knows.
FOREIGN_SIZES = {"zero_hpz_partition_size": (0, 1), "mics_shard_size": (-1, 0, 1)}
FOREIGN = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zenflow",
    "elastic_checkpoint",
    "autoep",
)
_STAGE_3 = (
    "allgather_sequential",
    "gather_16bit_weights_on_model_save",
    "max_live_parameters",
    "max_reuse_distance",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "param_persistence_threshold",
    "prefetch_bucket_size",
    "use_all_reduce_for_fetch_params",
)
OFFLOADS = {  # to host memory, with DeepSpeed's older words for it
    "offload_optimizer": "cpu_offload",
    "offload_param": "cpu_offload_param",
}
# What DeepSpeed 0.19 knows: a name that is not here is refused without DeepSpeed, too.
KNOWN = {
    *("stage", "leaf_module", "sub_group_size", "load_from_fp32_weights", "legacy_stage1", "compute_grad_norm"),
    *("allgather_bucket_size", "allgather_partitions", "reduce_bucket_size", "reduce_scatter", "overlap_comm"),
    *("contiguous_gradients", "round_robin_gradients", "parameter_alignment", "use_multi_rank_bucket_allreduce"),
    *("ignore_unused_parameters", "memory_efficient_linear", "override_module_apply", "pipeline_loading_checkpoint"),
    *("enable_sanity_checks", "log_trace_cache_warnings", "save_muon_momentum_buffer_in_memory"),
    *("cpu_offload_use_pin_memory", "stage3_gather_fp16_weights_on_model_save"),
    *(*OFFLOADS, *OFFLOADS.values(), "zero_hpz_partition_size", "elastic_checkpoint", "zenflow"),
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
    *_STAGE_3,
    *(f"stage3_{name}" for name in _STAGE_3),
}
KNOWN_OF_OFFLOAD = {
    "offload_optimizer": {
        *("device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio"),
        *("super_offload", "cpuadam_cores_perc"),
    },
    "offload_param": {"device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"},
}
DEVICES = ("none", "cpu", "nvme")


def of(found: dict[str, Any]) -> dict[str, Any]:
    """The section of the JSON; empty where it has none. Raises ConfigError for what has no meaning here."""
    entry = section(found.get(SECTION, {}), SECTION)
    stage = entry.get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"DEEPSPEED_CONFIG: {SECTION}.stage is {stage!r}: expected 0, 1, 2 or 3")
    foreign = [key for key in FOREIGN if entry.get(key)]
    foreign += [key for key, same in FOREIGN_SIZES.items() if entry.get(key) and entry[key] not in same]
    for key in foreign:
        raise ConfigError(f"DEEPSPEED_CONFIG: {SECTION}.{key} is not supported here: take it out")
    section(entry, SECTION, KNOWN)
    if not flag(entry, SECTION, "compute_grad_norm", True):
        raise ConfigError(f"DEEPSPEED_CONFIG: {SECTION}.compute_grad_norm is false: the log has the norm: take it out")
    offloads(entry)
    return entry


def offloads(entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """offload_optimizer, offload_param: what each says, where it offloads anything."""
    found = {}
    for key, older in OFFLOADS.items():
        said: dict[str, Any] = {}
        if entry.get(key) is not None:
            said = section(entry[key], f"{SECTION}.{key}", KNOWN_OF_OFFLOAD[key])
        if entry.get(older) is not None and flag(entry, SECTION, older):
            said = {"device": "cpu"} | said
        device = said.get("device", "none")
        if device not in DEVICES:
            raise ConfigError(f"DEEPSPEED_CONFIG: {SECTION}.{key}.device is {device!r}: expected none or cpu")
        if device != "none":
            found[key] = said
    return found


def validate(deepspeed: Any, entry: dict[str, Any]) -> None:
    """Raises ConfigError where DeepSpeed itself, of the version that is installed, would refuse the section."""
    try:
        deepspeed.runtime.zero.config.DeepSpeedZeroConfig(**entry)
    except (ValueError, AssertionError) as error:
        reason = str(error)
        if errors := getattr(error, "errors", None):  # pydantic's
            first = errors()[0]
            place = ".".join(map(str, (SECTION, *first["loc"])))
            reason = f"{place}: {first['msg']}, and it is {first['input']!r}" if first["loc"] else first["msg"]
        raise ConfigError(f"DEEPSPEED_CONFIG: DeepSpeed refuses {' '.join(reason.split())[:300]}") from None
