"""The layout of checkpoints is stable: those of earlier versions resume, and are written in the
same way.
"""

from __future__ import annotations

import pytest
import torch

from ..plain import model_of, step_of

PARTS = ("masters", "first_moments", "second_moments")


def _saved(model, precision):
    """The layout of the first version: nothing here comes from the code that writes it today."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    draw = lambda shape: torch.rand(shape, generator=generator)  # noqa: E731
    parts = {part: {name: draw(shapes[name]) for name in shapes} for part in PARTS}
    state = {
        "optimizer": {"num_steps": 11, **parts},
        "scaler": {"scale": 512.0, "num_good_steps": 7, "num_skipped_steps": 2},
    }
    if precision == "fp8":
        scales = torch.rand(3 * model.config.num_hidden_layers, 3)
        state["fp8"] = {"scales": scales, "calibrated": True}
    return state


def _assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            _assert_same(found[key], value)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [("lamb", "fp32"), ("lamb", "fp8"), ("lamb", "fp16"), ("adamw", "bf16")],
)
def test_a_checkpoint_of_the_first_version_loads_and_is_written_again_as_it_was(
    optimizer, precision, sharded, tiny
):
    model = model_of(tiny, seed=None)
    step = step_of(model, precision, optimizer=optimizer, sharded=sharded)
    saved = _saved(model, precision)
    step.load_state_dict(saved)
    assert not step.needs_calibration_step
    masters = saved["optimizer"]["masters"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name].to(parameter.dtype)), name
    _assert_same(step.state_dict(), saved)
