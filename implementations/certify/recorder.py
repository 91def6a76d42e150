"""Duration of each part of a step: waiting for data, compute, waiting for other ranks, update.

Steps are not synchronized with the device: a mark is a CUDA event, read after the last step.
"""

import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from review.acceptance.schema import PARTS

# A part lies between two marks.
_MARKS = (
    "start",
    "data",
    "gradients",
    "reduced",
    "updated",
)


class Recorder:
    """Marks the parts of steps; ``take`` turns the marks into seconds.

    compute: forward and backward, up to the gradient of the last parameter. wait: from there until
    the gradients are reduced, that is for slower ranks, the network and the norm for clipping.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # CPU seconds of this process in each step last taken.
        self.cpu: np.ndarray = np.empty(0, np.float32)
        self._steps: list[list[Any]] = []
        self._cpu: list[list[float]] = []
        # Events are used again: a burn-in would create millions.
        self._free: list[torch.cuda.Event] = []
        self._hooks: dict[nn.Parameter, torch.utils.hooks.RemovableHandle] = {}
        self._last: torch.Tensor | None = None

    def watch(self, model: nn.Module) -> None:
        """Marks when the gradients of the model are complete. Call ``watch_last`` after the first
        step.
        """

        def mark(parameter: torch.Tensor) -> None:
            self._last = parameter
            self.mark("gradients")

        self._hooks = {
            weight: weight.register_post_accumulate_grad_hook(mark)
            for weight in model.parameters()
        }

    def watch_last(self) -> None:
        """Keeps only the hook of the parameter whose gradient comes last: the order is the same in
        every step.
        """
        # A hook for each of hundreds of parameters would take time that is then measured.
        for parameter, hook in self._hooks.items():
            if parameter is not self._last:
                hook.remove()
        self._clear()

    def begin(self) -> None:
        """Begins a step."""
        self._steps.append([None] * len(_MARKS))
        # Of all threads of the process; the verdict tells a
        # starved rank by time without CPU seconds.
        self._cpu.append([time.process_time()] * 2)
        self.mark("start")

    def mark(self, name: str) -> None:
        """Ends a part here, on the device; of several marks of one name in a step, the last
        counts.
        """
        if not self._steps:
            return
        step, column = self._steps[-1], _MARKS.index(name)
        if self.device.type != "cuda":
            step[column] = time.perf_counter()
            return
        # Each micro-batch marks its gradients: the same event is recorded again.
        if step[column] is None:
            step[column] = (
                self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            )
        step[column].record()

    def end(self, whole: bool = False) -> None:
        """Ends a step on the host. whole: it was one CUDA graph, which has no marks inside and
        counts as compute.
        """
        if whole:
            # Marks after the graph fall together, so wait and update take no time.
            for name in _MARKS[2:]:
                self.mark(name)
        if self._cpu:
            self._cpu[-1][1] = time.process_time()

    def take(self) -> np.ndarray:
        """Returns and clears the seconds by step and part, float32 [steps, 4]. Waits for the
        device.
        """
        taken = np.empty((len(self._steps), len(PARTS)), np.float32)
        # The only place where the host waits for the device.
        if cuda := self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for number, marks in enumerate(self._steps):
            for part, (begin, end) in enumerate(pairwise(marks)):
                taken[number, part] = (
                    begin.elapsed_time(end) / 1e3 if cuda else end - begin
                )
            # elapsed_time has been read, so they may be recorded anew.
            self._free += marks if cuda else []
        self.cpu = np.array([end - begin for begin, end in self._cpu], np.float32)
        self._clear()
        return taken

    def _clear(self) -> None:
        self._steps.clear()
        self._cpu.clear()
