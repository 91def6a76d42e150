"""How long the parts of each step take: waiting for data, computing, waiting for others, the update.

Nothing in a step waits for the device: a mark is an event on it, and events are read after the last step.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from certify.schema import PARTS

_MARKS = ("start", "data", "gradients", "reduced", "updated")  # a part lies between two of them


class Recorder:
    """Marks the parts of steps, from ``begin`` to the next; ``take`` turns them into seconds.

    compute is forward and backward, up to the gradient of the last parameter. What follows, until the gradients of all
    ranks are one, is wait: for slower ranks, for the network, and for the norm that clips them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Seconds that this process used of CPUs in each step that was taken last.
        self.cpu: np.ndarray = np.empty(0, np.float32)
        self._steps: list[list[Any]] = []
        self._cpu: list[list[float]] = []
        self._free: list[torch.cuda.Event] = []
        self._hooks: dict[nn.Parameter, torch.utils.hooks.RemovableHandle] = {}
        self._last: nn.Parameter | None = None

    def watch(self, model: nn.Module) -> None:
        """Marks where the gradients of the model are complete. Call ``settle`` after the first step."""
        for parameter in model.parameters():
            self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._gradient)

    def _gradient(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._last = parameter
        self.mark("gradients")

    def settle(self) -> None:
        """Watches the parameter alone whose gradient comes last: the order is the same in every step."""
        for parameter, hook in self._hooks.items():
            if parameter is not self._last:
                hook.remove()
        self._forget()

    def begin(self) -> None:
        """A step begins."""
        self._steps.append([None] * len(_MARKS))
        self._cpu.append([time.process_time()] * 2)
        self.mark("start")

    def mark(self, name: str) -> None:
        """A part ends here, on the device; of marks of the same name in a step, the last one counts."""
        if not self._steps:
            return
        step, place = self._steps[-1], _MARKS.index(name)
        if self.device.type != "cuda":
            step[place] = time.perf_counter()
            return
        if step[place] is None:
            step[place] = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        step[place].record()

    def end(self, whole: bool = False) -> None:
        """A step is over on the host. whole: it was one CUDA graph, all of it compute: no mark lies within a graph."""
        if whole:
            for name in _MARKS[2:]:
                self.mark(name)
        if self._cpu:
            self._cpu[-1][1] = time.process_time()

    def take(self) -> np.ndarray:
        """Seconds by step and part [steps, 4] float32, and forgets them. Waits for the device."""
        taken = np.empty((len(self._steps), len(PARTS)), np.float32)
        if cuda := self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for number, marks in enumerate(self._steps):
            for part, (begin, end) in enumerate(pairwise(marks)):
                taken[number, part] = begin.elapsed_time(end) / 1e3 if cuda else end - begin
            self._free += marks if cuda else []
        self.cpu = np.array([end - begin for begin, end in self._cpu], np.float32)
        self._forget()
        return taken

    def _forget(self) -> None:
        self._steps.clear()
        self._cpu.clear()
