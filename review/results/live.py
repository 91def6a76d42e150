"""How `watch` follows something that changes: one state after the other, printed or drawn, until it has ended."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from review.results.display import console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

State = TypeVar("State")


def follow(
    poll: Callable[[float], State],
    ended: Callable[[State], bool],
    interval: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Iterator[State]:
    """The state at the clock's time every ``interval`` seconds, up to the one that has ended."""
    while True:
        state = poll(clock())
        yield state
        if ended(state):
            return
        sleep(interval)


def show(
    states: Iterator[State],
    as_json: bool,
    once: bool,
    say: Callable[[State], None],
    news: Callable[[State], object],
    render: Callable[[State, Console], RenderableType],
) -> State:
    """Shows the first state, or all: drawn on a terminal, else said whenever there are ``news``. The last one shown."""
    first = state = next(states)
    if once:
        say(state)
        return state
    if not as_json and sys.stdout.isatty():
        return draw(state, states, render)
    shown = None
    for state in itertools.chain([first], states):
        if news(state) != shown:
            say(state)
            shown = news(state)
    return state


def draw(state: State, states: Iterator[State], render: Callable[[State, Console], RenderableType]) -> State:
    """Draws a state and those that follow in its place; the last one."""
    from rich.live import Live

    out = console()
    with Live(render(state, out), console=out, auto_refresh=False) as live:
        for state in states:
            live.update(render(state, out), refresh=True)
    return state
