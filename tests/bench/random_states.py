"""The random numbers of a GPU in name: those of the CPU, by PyTorch's rules for graphs."""

from __future__ import annotations

from types import SimpleNamespace

import torch


class Generator:
    """Has a state that can be exchanged. A graph draws for good from the one that was current when
    it was captured, whereas seeds reach the one that is current now; a capture that fails leaves
    its state unusable.
    """

    def __init__(self):
        self.state = SimpleNamespace(capturing=False, numbers=None)

    def graphsafe_get_state(self):
        return self.state

    def clone_state(self):
        return SimpleNamespace(capturing=False, numbers=torch.get_rng_state())

    def graphsafe_set_state(self, state):
        if state is not self.state:
            self.state.numbers = torch.get_rng_state()
            torch.set_rng_state(state.numbers)
        self.state = state

    def begin(self):
        """Of a capture; returns the state of its graph."""
        self.state.capturing = True
        return self.state

    def end(self, state):
        """Of a capture that succeeded."""
        state.capturing = False

    def replay(self, state, launch):
        """Launches a graph of that state."""
        current = self.graphsafe_get_state()
        self.graphsafe_set_state(state)
        try:
            launch()
        finally:
            self.graphsafe_set_state(current)

    def check(self):
        """Before eager work that draws."""
        if self.state.capturing:
            raise RuntimeError(
                "Offset increment outside graph capture encountered unexpectedly."
            )
