"""DATA_LOADER=dali: the batches of our loader through a pipeline of NVIDIA DALI, which prefetches them to the GPU.

DALI has no reader of records of any kind; what it adds is its own thread and stream for the copy. So the batches are
made as always, on the data thread, and enter the pipeline by its external source: every step is an iteration, every
micro-batch a sample, every tensor field of the batch an input. On a machine without a GPU the pipeline runs on the CPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from bert.core.env import ConfigError
from bert.data.batch import Batch

PREFETCHED = 2  # steps that DALI holds ready
_KEPT = 4  # steps whose tensors live on: copies of at most two steps are under way when one is asked for

AnyBatch = TypeVar("AnyBatch", bound=Batch)
MadeBatch = TypeVar("MadeBatch", bound=Batch, covariant=True)


class Loader(Protocol[MadeBatch]):
    """What makes the batches: TrainingData."""

    def next_step(self) -> Sequence[MadeBatch]:
        """Micro-batches of the next step, on the CPU."""
        ...

    def close(self) -> None:
        """Stops it."""
        ...


def is_installed() -> bool:
    """Whether the package is there; PyPI's nvidia-dali, which is not NVIDIA's, has no such module."""
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def check() -> None:
    """Raises ConfigError where DALI is not installed."""
    if not is_installed():
        raise ConfigError(
            "DATA_LOADER=dali: NVIDIA DALI is not installed: pip install -r requirements/dali.txt, or unset DATA_LOADER"
        )


class DaliLoader(Generic[AnyBatch]):
    """Another loader's steps, in its order, on the device."""

    def __init__(self, loader: Loader[AnyBatch], device: torch.device, micro_batches: int) -> None:
        """micro_batches: of a step. Takes the loader's first steps at once. Raises ConfigError without DALI."""
        check()
        self.loader, self.device = loader, device
        self._given: deque[list[AnyBatch]] = deque()  # steps within the pipeline: what is no tensor of their batches
        self._error: Exception | None = None  # of the loader, for its turn: DALI asks some steps ahead
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._kept: deque[list[AnyBatch]] = deque(maxlen=_KEPT)
        self._names: list[str] = []
        self._first: list[AnyBatch] | None = None  # taken to know the fields, before there is a pipeline
        self._micro_batches = micro_batches
        self._pipeline: Any = None

    def next_step(self) -> list[AnyBatch]:
        """Micro-batches of the next step, on the device. Raises what the loader raised, at the turn of that step."""
        if self._pipeline is None:
            self._first = self._take()
            self._names = list(self._first[0].tensors())
            self._pipeline = self._build()
        try:
            outputs = self._pipeline.run()
        except StopIteration:
            assert self._error is not None
            raise self._error from None
        step = self._to_torch(outputs, self._given.popleft())
        self._kept.append(step)
        return step

    def close(self) -> None:
        """Stops the loader and lets go of the pipeline, with the steps that it holds."""
        self.loader.close()
        self._pipeline = None

    def _take(self) -> list[AnyBatch]:
        """The loader's next step, and from its first error on that error."""
        if self._error is None:
            try:
                return list(self.loader.next_step())
            except Exception as error:
                self._error = error
        raise self._error

    def _build(self) -> Any:
        from nvidia.dali import fn, pipeline_def

        on_gpu = self._stream is not None
        gpu: Any = self.device.index or 0 if on_gpu else None

        @pipeline_def(
            batch_size=self._micro_batches,
            num_threads=1,
            device_id=gpu,
            prefetch_queue_depth=PREFETCHED,
        )
        def pipeline() -> Any:
            fields = fn.external_source(source=self._feed, num_outputs=len(self._names), batch=True)
            return tuple(field.gpu() if on_gpu else field for field in fields)

        built = pipeline()
        built.build()
        return built

    def _feed(self) -> list[list[Any]]:
        """The next step, as DALI takes it: for each field its micro-batches."""
        try:
            batches = self._take() if self._first is None else self._first
        except Exception:
            raise StopIteration from None
        self._first = None
        self._given.append(batches)
        return [[batch.tensors()[name].numpy() for batch in batches] for name in self._names]

    def _to_torch(self, outputs: Sequence[Any], batches: list[AnyBatch]) -> list[AnyBatch]:
        """The outputs as batches: DALI takes its buffers back at the next run."""
        from nvidia.dali.plugin.pytorch import feed_ndarray

        made = []
        with torch.cuda.stream(self._stream):
            for number, batch in enumerate(batches):
                fields: dict[str, Any] = {}
                for name, output in zip(self._names, outputs, strict=True):
                    fields[name] = torch.empty_like(getattr(batch, name), device=self.device)
                    feed_ndarray(output[number], fields[name], cuda_stream=self._stream)
                made.append(dataclasses.replace(batch, **fields))
        if self._stream is not None:
            self._stream.synchronize()  # of these copies alone; the device goes on with the step before
            for batch in made:
                for tensor in batch.tensors().values():
                    tensor.record_stream(torch.cuda.current_stream(self.device))
        return made
