"""``EMULATE_RANK=R WORLD_SIZE=W python -m bert``: one rank of a large job, alone, to see what it holds and takes.

The rank is built as in the job, its shard with the job's first weights, and takes steps on dummy batches; what other
ranks would send is its own (dist.EmulatedWorld), and nothing is trained. On a GPU all of it is there, and steps are
timed, without the time of communication. On a CPU what every rank holds whole has shapes and no numbers, so that a
host holds a rank of any job: forward and backward pass are counted operation by operation, and the shard is updated.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from functools import partial

import torch

from bert.core.dist import EmulatedWorld
from bert.core.env import ConfigError
from bert.data import loader
from bert.data.batch import PretrainingBatch
from bert.pretraining import memory
from bert.pretraining.config import Config
from bert.pretraining.train import build, dummy_batches, prepare
from bert.training.step import Step

TIMED_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes of one rank by part: persistent, and which of them are materialized, not on meta; transient: of a step.

    milliseconds: of a step, None where it was not timed; resident: of this process, when built and at most.
    """

    persistent: dict[str, int]
    materialized: dict[str, int]
    transient: int
    milliseconds: float | None
    resident: tuple[int, int]


def check(config: Config) -> None:
    """Raises ConfigError for a run of which no rank can be emulated here."""
    if config.zero.is_deepspeed or not config.optim.is_sharded(config.device):
        raise ConfigError("EMULATE_RANK needs a sharded optimizer of ours: set SHARD_OPTIMIZER=1")
    if config.capture.kinds or config.profile.steps:
        raise ConfigError("EMULATE_RANK takes made-up steps and writes nothing: unset CAPTURE and PROFILE_STEPS")
    whole = config.optim.group_size(config.dist.world_size, config.dist.ranks_per_node) == 1
    if config.device.type == "cpu" and (config.numerics.fp8 or config.optim.clip == "before" or whole):
        raise ConfigError(
            "EMULATE_RANK on a CPU has no gradients: set PRECISION=bf16, CLIP=after and no SHARD_GROUP=1, or use a GPU"
        )


def measure(config: Config) -> Measured:
    """Builds the rank and takes its steps."""
    rank, device = config.dist.emulated_rank, config.device
    assert rank is not None
    on_gpu = device.type == "cuda"
    if config.dist.num_threads and not on_gpu:
        torch.set_num_threads(config.dist.num_threads)
    gathered_device = device if on_gpu else memory.META
    world = EmulatedWorld(config.dist.world_size, rank, device, gathered_device, config.dist.ranks_per_node)
    model, step = build(config, world, config.seed or 0)
    assert isinstance(step, Step)
    engine = step.optimizer
    persistent = memory.persistent_bytes(engine)
    materialized = memory.persistent_bytes(engine, materialized=True)
    built, milliseconds = _resident(), None
    if on_gpu:
        take_step, _ = prepare(config, model, step, world)
        batches = dummy_batches(config, world)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(TIMED_STEPS):
            take_step(batches, 0.0)
        torch.cuda.synchronize()
        milliseconds = (time.perf_counter() - begin) / TIMED_STEPS * 1e3
        most = torch.cuda.max_memory_allocated()
    else:
        batches = [meta_batch(config.data)] * min(2, config.data.gradient_steps)
        with memory.Peak([*engine.state_tensors(), *memory.gradient_buffers(engine)]) as peak:
            step.run(batches)
        most = peak.most
    return Measured(
        persistent=persistent, materialized=materialized, transient=most - sum(persistent.values()),
        milliseconds=milliseconds, resident=(built, _resident()),
    )  # fmt: skip


def meta_batch(data: loader.Config) -> PretrainingBatch:
    """A micro-batch as large as any, of whole rows; on the meta device, but for where its sequences begin."""
    room, length = data.capacity, data.max_seq_length
    rows, empty = room.tokens // length, partial(torch.empty, device=memory.META)
    return PretrainingBatch(
        input_ids=empty(room.tokens, dtype=torch.int32), segment_ids=empty(room.tokens, dtype=torch.int32),
        position_ids=empty(room.tokens, dtype=torch.int32),
        cu_seqlens=torch.arange(0, room.tokens + 1, length, dtype=torch.int32), max_seqlen=length,
        num_tokens=room.tokens, num_sequences=rows, num_masked=room.masked,
        masked_positions=empty(room.masked, dtype=torch.int32), masked_labels=empty(room.masked, dtype=torch.int64),
        next_sentence_labels=empty(rows, dtype=torch.int64),
    )  # fmt: skip


def report(config: Config) -> str:
    """What the rank holds, by part, beside what memory.py foresees. Raises ConfigError, see check()."""
    check(config)
    foreseen = memory.estimate(memory.Plan.of(config))
    found = measure(config)
    lines = [f"rank {config.dist.emulated_rank} of {config.dist.world_size}, {config.bert_config_path}, in GiB"]
    lines.append(f"{'':<12} {'held':>8} {'of it here':>11} {'estimate':>9}")
    for name, size in {**found.persistent, "activations": found.transient}.items():
        here = _gib(found.materialized.get(name, 0))
        lines.append(f"{name:<12} {_gib(size):>8} {here:>11} {_gib(foreseen[name]):>9}")
    total = sum(found.persistent.values()) + found.transient
    lines.append(f"{'together':<12} {_gib(total):>8} {'':>11} {_gib(sum(foreseen.values())):>9}")
    built, most = map(_gib, found.resident)
    lines.append(f"this process was resident with {built} when built, {most} at most")
    if found.milliseconds is not None:
        lines.append(f"{found.milliseconds:.1f} ms a step, without communication")
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / memory.GIB:.2f}"


def _resident() -> int:
    """The most bytes of host memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
