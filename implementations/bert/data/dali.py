"""DATA_LOADER=dali: our loader's batches through an NVIDIA DALI pipeline, which prefetches them to
the GPU.

DALI has no reader for these records; it adds a thread and a stream for the copy. Batches are made
on the data thread as usual and enter the pipeline as an external source: an iteration is a step, a
sample a micro-batch, an input a tensor field of the batch. Without a GPU the pipeline runs on the
CPU.
"""

import dataclasses
import importlib.util
from collections import deque
from typing import Any

import torch

from bert.data.batch import PretrainingBatch
from common.env import ConfigError

PREFETCHED = 2  # steps that DALI holds ready
_KEPT = 4  # steps whose tensors are kept alive: copies of up to two may be in flight when the next is requested


def check() -> None:
    """Raises ConfigError if DALI is not installed; PyPI's nvidia-dali, which is not NVIDIA's, has
    no such module.
    """
    if not (
        importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
    ):
        raise ConfigError(
            "DATA_LOADER=dali: NVIDIA DALI is not installed: pip install -r requirements/dali.txt, or unset DATA_LOADER"
        )


class DaliLoader:
    """The steps of another loader, in its order, on the device."""

    def __init__(self, loader: Any, device: torch.device, micro_batches: int) -> None:
        """loader: TrainingData, or any object with its next_step and close. Raises ConfigError
        without DALI.
        """
        check()
        from nvidia.dali import fn, pipeline_def

        self.loader, self.device = loader, device
        self._given: deque[list[PretrainingBatch]] = deque()  # steps in the pipeline
        self._kept: deque[list[PretrainingBatch]] = deque(maxlen=_KEPT)
        # Of the loader, raised at its step: DALI prefetches.
        self._error: Exception | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        gpu: Any = None if self._stream is None else device.index or 0
        # Annotations are postponed, so the type is a string here.
        num_fields = sum(
            field.type == "Tensor" for field in dataclasses.fields(PretrainingBatch)
        )

        @pipeline_def(
            batch_size=micro_batches,
            num_threads=1,
            device_id=gpu,
            prefetch_queue_depth=PREFETCHED,
        )
        def pipeline() -> Any:
            fields = fn.external_source(
                source=self._take_step, num_outputs=num_fields, batch=True
            )
            return tuple(field if gpu is None else field.gpu() for field in fields)

        self._pipeline = pipeline()
        self._pipeline.build()

    def next_step(self) -> list[PretrainingBatch]:
        """Micro-batches of the next step, on the device. Raises what the loader raised for that
        step.
        """
        from nvidia.dali.plugin.pytorch import feed_ndarray

        try:
            outputs = self._pipeline.run()
        except StopIteration:
            assert self._error is not None
            raise self._error from None
        step = []
        with torch.cuda.stream(self._stream):
            for number, batch in enumerate(self._given.popleft()):
                fields: dict[str, Any] = {}
                for (name, tensor), output in zip(
                    batch.tensors().items(), outputs, strict=True
                ):
                    # DALI reuses its buffers.
                    fields[name] = torch.empty_like(tensor, device=self.device)
                    feed_ndarray(output[number], fields[name], cuda_stream=self._stream)
                step.append(dataclasses.replace(batch, **fields))
        if self._stream is not None:
            # The host waits for these copies alone; the device continues with the previous step.
            self._stream.synchronize()
            for batch in step:
                for tensor in batch.tensors().values():
                    tensor.record_stream(torch.cuda.current_stream(self.device))
        self._kept.append(step)
        return step

    def close(self) -> None:
        """Stops the loader and drops the pipeline with its steps."""
        self.loader.close()
        self._pipeline = None

    def _take_step(self) -> list[list[Any]]:
        """The loader's next step for DALI: for each field its micro-batches. Ends after an
        error.
        """
        if self._error is None:
            try:
                self._given.append(list(self.loader.next_step()))
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise StopIteration
        batches = self._given[-1]
        return [
            [batch.tensors()[name].numpy() for batch in batches]
            for name in batches[0].tensors()
        ]
