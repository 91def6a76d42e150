"""DATA_LOADER=dali: the batches of our loader through a pipeline of NVIDIA DALI, which prefetches them to the GPU.

DALI has no reader of records of any kind; what it adds is its own thread and stream for the copy. So the batches are
made as always, on the data thread, and enter the pipeline by its external source: every step is an iteration, every
micro-batch a sample, every tensor field of the batch an input. On a machine without a GPU the pipeline runs on the CPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from bert.core.env import ConfigError
from bert.data.batch import PretrainingBatch

PREFETCHED = 2  # steps that DALI holds ready
_KEPT = 4  # steps whose tensors live on: copies of at most two steps are under way when one is asked for


def is_installed() -> bool:
    """Whether the package is there; PyPI's nvidia-dali, which is not NVIDIA's, has no such module."""
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def check() -> None:
    """Raises ConfigError where DALI is not installed."""
    if not is_installed():
        raise ConfigError(
            "DATA_LOADER=dali: NVIDIA DALI is not installed: pip install -r requirements/dali.txt, or unset DATA_LOADER"
        )


class DaliLoader:
    """Another loader's steps, in its order, on the device."""

    def __init__(self, loader: Any, device: torch.device, micro_batches: int) -> None:
        """loader: TrainingData, or what has its next_step and close. Raises ConfigError without DALI."""
        check()
        self.loader, self.device, self._micro_batches = loader, device, micro_batches
        self._given: deque[list[PretrainingBatch]] = deque()  # steps within the pipeline
        self._kept: deque[list[PretrainingBatch]] = deque(maxlen=_KEPT)
        self._error: Exception | None = None  # of the loader, for its turn: DALI asks some steps ahead
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._steps = self._take_steps()
        self._pipeline: Any = None

    def next_step(self) -> list[PretrainingBatch]:
        """Micro-batches of the next step, on the device. Raises what the loader raised, at the turn of that step."""
        try:
            if self._pipeline is None:
                self._pipeline = self._build(next(self._steps))
            outputs = self._pipeline.run()
        except StopIteration:
            assert self._error is not None
            raise self._error from None
        from nvidia.dali.plugin.pytorch import feed_ndarray

        step = []
        with torch.cuda.stream(self._stream):
            for number, batch in enumerate(self._given.popleft()):
                fields: dict[str, Any] = {}
                for (name, tensor), output in zip(batch.tensors().items(), outputs, strict=True):
                    fields[name] = torch.empty_like(tensor, device=self.device)  # DALI takes its buffers back
                    feed_ndarray(output[number], fields[name], cuda_stream=self._stream)
                step.append(dataclasses.replace(batch, **fields))
        if self._stream is not None:
            self._stream.synchronize()  # of these copies alone; the device goes on with the step before
            for batch in step:
                for tensor in batch.tensors().values():
                    tensor.record_stream(torch.cuda.current_stream(self.device))
        self._kept.append(step)
        return step

    def close(self) -> None:
        """Stops the loader and lets go of the pipeline, with the steps that it holds."""
        self.loader.close()
        self._pipeline = None

    def _take_steps(self) -> Iterator[list[list[Any]]]:
        """The loader's steps up to its first error, as DALI takes them: for each field its micro-batches."""
        try:
            while True:
                batches = list(self.loader.next_step())
                self._given.append(batches)
                yield [[batch.tensors()[name].numpy() for batch in batches] for name in batches[0].tensors()]
        except Exception as error:
            self._error = error

    def _build(self, first: list[list[Any]]) -> Any:
        from nvidia.dali import fn, pipeline_def

        on_gpu, steps = self._stream is not None, itertools.chain([first], self._steps)
        gpu: Any = self.device.index or 0 if on_gpu else None

        @pipeline_def(
            batch_size=self._micro_batches, num_threads=1, device_id=gpu, prefetch_queue_depth=PREFETCHED
        )  # fmt: skip
        def pipeline() -> Any:
            fields = fn.external_source(source=lambda: next(steps), num_outputs=len(first), batch=True)
            return tuple(field.gpu() if on_gpu else field for field in fields)

        built = pipeline()
        built.build()
        return built
