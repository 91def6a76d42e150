"""Before the clock: steps that compile kernels; a step or an evaluation pass captured as one CUDA
graph.

A graph is captured once, then launched with a single call. It works on fixed memory and fixed sizes
(a Capacity), so batches are padded and copied in. The copies run ahead on a separate stream, from
page-locked memory into one of two staging buffers, while the graph of the previous step still runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bert.data.batch import AnyBatch, AnyCapacity, Batch, Capacity
from bert.data.records import DataError
from bert.kernels.support.graph_capture import CaptureError, capture, warm_stream
from bert.training.step import Step, StepResult, TrainingStep
from common.env import env
from common.process import say

# Before the capture: compile kernels, initialize libraries and communicators.
NUM_WARM_UP_STEPS = 3
# The next step's batch arrives in one while the graph reads the other's copy.
NUM_STAGING_BUFFERS = 2


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    cuda_graph: bool | None = env(
        "CUDA_GRAPH",
        None,
        "1: a CUDA graph for steps, one for evaluation; unset: packed pretraining on GPUs",
    )


def graph_capacity(capacity: AnyCapacity, num_rows: int) -> AnyCapacity:
    """Capacity with room for the padding tokens, which form sequences of up to a row's length
    (static_batch).
    """
    return dataclasses.replace(capacity, sequences=capacity.sequences + num_rows)


def static_batch(batch: AnyBatch, capacity: Capacity) -> AnyBatch:
    """The batch padded to ``capacity``, with every token in some sequence; losses and gradients do
    not change.

    Attention libraries leave the output of tokens outside of all sequences undefined, even nan.
    Raises DataError if the batch exceeds the capacity.
    """
    try:
        filled = batch.pad_to(capacity)
    except ValueError as error:
        raise DataError(
            f"{error}: raise MAX_SEQUENCES_PER_ROW, or set CUDA_GRAPH=0"
        ) from None
    # Padding tokens form sequences of up to full length; the sequences left over are empty.
    ends = batch.num_tokens + batch.max_seqlen * torch.arange(
        1, capacity.sequences - batch.num_sequences + 1, dtype=torch.int32
    )
    offsets = torch.cat(
        [batch.cu_seqlens, ends.clamp(max=capacity.tokens).to(torch.int32)]
    )
    if int(offsets[-1]) < capacity.tokens:
        raise DataError(
            f"{capacity} leaves no room for the padding tokens: raise MAX_SEQUENCES_PER_ROW"
        )
    # The graph computes on all tokens; the labels tell real ones from padding.
    return dataclasses.replace(filled, cu_seqlens=offsets)


def copy_batches(targets: Sequence[Batch], sources: Sequence[Batch]) -> None:
    """Copies the tensors of batches of equal sizes; from page-locked memory without waiting."""
    for target, source in zip(targets, sources, strict=True):
        values = source.tensors()
        for name, tensor in target.tensors().items():
            tensor.copy_(values[name], non_blocking=True)


class StepGraph:
    """A captured step; ``result`` is overwritten by each launch."""

    def __init__(
        self,
        step: Step,
        batches: Sequence[Batch],
        stream: torch.cuda.Stream,
        before: StepGraph | None,
    ) -> None:
        """``before``: a captured step whose memory is reused, see capture()."""
        self.result: StepResult

        def run() -> None:
            self.result = step.run(batches)

        earlier = before.graph if before is not None else None
        self.graph: torch.cuda.CUDAGraph = capture(run, stream, earlier)


class GraphedStep:
    """Step's signature, run from a graph. Capturing leaves weights, optimizer, scales and RNG
    unchanged.

    The first fp8 step, which measures the scales, is a separate graph in the memory of the other:
    run eagerly, its activations would need additional memory, and a batch that just fits would run
    out of it in the first step.
    """

    def __init__(self, step: Step, examples: Sequence[Batch]) -> None:
        """``examples``: micro-batches at capacity, as in training. Raises CaptureError, on every
        rank.
        """
        self.step, self.device = step, step.world.device
        self.batches = [batch.to(self.device) for batch in examples]
        self.staging = [
            [batch.to(self.device) for batch in examples]
            for _ in range(NUM_STAGING_BUFFERS)
        ]
        self.count = 0
        self.copies = torch.cuda.Stream(self.device)
        # By staging buffer: its batch is in it, has been copied out of it, and its step is done.
        self.arrived, self.consumed, self.finished = (
            [torch.cuda.Event() for _ in range(NUM_STAGING_BUFFERS)] for _ in range(3)
        )
        # By whether the step measures fp8 scales.
        self.captured: dict[bool, StepGraph] = {}
        # The warm-up takes real steps, so that everything a step needs is compiled and allocated.
        with step.rollback():
            stream = warm_stream(
                lambda: step.run(self.batches), NUM_WARM_UP_STEPS, self.device
            )
        with step.rollback():
            earlier, failed = None, None
            try:
                # A measuring step is followed by one that does not measure.
                while step.needs_calibration_step not in self.captured:
                    measures = step.needs_calibration_step
                    # Current now, but not at a replay: each gathers the weights.
                    step.optimizer.weights.mark_stale()
                    earlier = self.captured[measures] = StepGraph(
                        step, self.batches, stream, earlier
                    )
            except CaptureError as error:
                failed = error
            # Before the first launch, in which ranks with a graph would wait for one without.
            if step.world.any(failed is not None):
                failed = failed or CaptureError("on another rank")
                # The error holds this object, and a graph its memory.
                for captured in self.captured.values():
                    captured.graph.reset()
                self.captured.clear()
                # A gather that the capture has started never runs.
                step.optimizer.weights.mark_stale()
            else:
                for captured in self.captured.values():
                    self._start(captured)  # the first launch of a graph is slow
        if failed:
            raise failed
        # What the first launches do must end before the clock starts.
        torch.cuda.synchronize(self.device)

    def __call__(self, batches: Sequence[Batch], lr: float | Tensor) -> StepResult:
        """Trains on micro-batches in page-locked memory. The result is valid until the next
        call.
        """
        slot = self.count % NUM_STAGING_BUFFERS
        self.count += 1
        # Run at most two steps ahead of the device.
        self.step.world.wait_for(self.finished[slot])
        stream = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.copies):
            # Not before the step has read this buffer's last batch.
            self.copies.wait_event(self.consumed[slot])
            copy_batches(self.staging[slot], batches)
            self.arrived[slot].record(self.copies)
        # The stream waits, not the host.
        stream.wait_event(self.arrived[slot])
        # Within the device, behind the graph's last replay, which reads the same memory.
        copy_batches(self.batches, self.staging[slot])
        self.consumed[slot].record(stream)
        self.step.lr.fill_(lr)
        captured = self.captured[self.step.needs_calibration_step]
        self._start(captured)
        self.finished[slot].record(stream)
        return captured.result

    def _start(self, captured: StepGraph) -> None:
        captured.graph.replay()
        self.step.after_graph_replay()


def capture_or_warm_up(
    step: Step, examples: Callable[[], Sequence[Batch]], *, graph: bool, warm_up: bool
) -> TrainingStep:
    """The step for the loop: captured as a CUDA graph, or, without ``graph`` or if that fails
    (which is printed), the step itself, run once if ``warm_up``.

    Afterwards kernels, allocator and communicators are ready; weights, moments, step count, scales
    and random states are bit for bit unchanged. examples: micro-batches of one step, as the data
    source gives them.
    """
    if graph:
        try:
            return GraphedStep(step, examples())
        except CaptureError as error:
            warm_up = True
            if step.world.is_main:
                say(f"bert: steps run without a CUDA graph, which failed: {error}")
    torch.cuda.empty_cache()  # a failed capture's memory, for the eager steps; nothing without a GPU
    if warm_up:
        with step.rollback():
            # The step that measures fp8 scales runs other kernels than those after it.
            for _ in range(2 if step.needs_calibration_step else 1):
                step(examples(), 0.0)
        step.model.zero_grad()
    return step
