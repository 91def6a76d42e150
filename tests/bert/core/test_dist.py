"""The process group of a run: when it is left, and what is kept of it."""

from __future__ import annotations

from bert.core import dist
from bert.core.dist import World

from ..ranks import run_ranks


def _look(world: World, before: list[int]) -> None:
    """What was left before this world."""
    before.append(world.size)
    assert [group.size() for group in dist._left] == before[:-1], "a group of which nothing is kept"


def test_a_group_that_was_left_is_kept_so_that_no_model_is_the_last_to_let_go_of_it():
    run_ranks(_look, 2, 2, arguments=([],))
