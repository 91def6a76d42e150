"""CAPTURE: tensors by module in the order of the step, compared; PROFILE_STEPS: a trace of the chosen steps."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch

from bert.__main__ import main
from bert.core import rundir
from bert.model.recompute import Recomputation
from bert.training import debug
from bert.training.debug import CaptureConfig, ProfileConfig, ProfiledStep
from common.env import ConfigError

from ..plain import step_of


def compare(*paths):
    return main(["compare-captures", *map(str, paths)], {})


@pytest.fixture
def captured(tiny, make_model, make_records, batch_of, tmp_path):
    """captured(name, spoil=None, recompute=False, num_steps=1) -> the folder that twelve steps
    leave; the first ``num_steps`` of them are written.
    """
    batches = [
        batch_of(make_records(2), np.arange(begin, begin + 1)) for begin in (0, 1)
    ]

    def twelve_steps(name, spoil=None, recompute=False, num_steps=1, rate=0.1):
        model = make_model(tiny, dtype=torch.float32)
        if spoil:
            with torch.no_grad():
                dict(model.named_parameters())[spoil][0] += 0.5
        if recompute:
            model.recompute(Recomputation(1, random_state=True))
        step = step_of(model, accumulate=True, optimizer="adamw", sharded=False)
        take_step = debug.RecordedStep(tmp_path / name, 0, model, step, num_steps)
        for seed in range(12):
            torch.manual_seed(seed)
            take_step(batches, rate)
        return tmp_path / name

    return twelve_steps


def test_the_first_module_that_differs_is_named_and_equal_is_equal(captured, capsys):
    one = captured("one")
    assert [path.name for path in one.iterdir()] == ["step_1_rank_0.safetensors"]
    (path,) = one.iterdir()
    names = [name.rpartition(".") for name, *_ in debug.differences(path, path)]
    forward = [name for name, _, kind in names if kind == "activation"]
    backward = [name for name, _, kind in names if kind == "gradient"]
    # As the step computes them.
    assert backward == [name for name in reversed(forward) if name in set(backward)]
    assert compare(one, captured("again", recompute=True)) == 0
    assert capsys.readouterr().out == "equal\n"
    spoilt = captured("spoilt", spoil="bert.encoder.layer.1.intermediate.dense.bias")
    assert compare(one, spoilt) == 1
    said = capsys.readouterr().out.splitlines()
    first = "1.bert.encoder.layer.1.intermediate.activation of step_1_rank_0"
    assert said[-1] == f"the first that differs: {first}.safetensors"
    # Gradients flow back to layer 0.
    assert any("2.bert.encoder.layer.0.attention.gradient" in line for line in said)
    assert not any("layer.0" in line and ".activation" in line for line in said)
    assert compare(one, one / "nothing") == 2


def test_of_several_steps_the_first_that_differs_is_the_earliest(captured, capsys):
    one, other = captured("one", num_steps=11), captured("two", num_steps=11, rate=0.2)
    names = {f"step_{step}_rank_0.safetensors" for step in range(1, 12)}
    assert {path.name for path in one.iterdir()} == names
    assert compare(one, other) == 1
    # The first after the update.
    last = "activation of step_2_rank_0.safetensors"
    assert capsys.readouterr().out.splitlines()[-1].endswith(last)


@pytest.fixture
def file(tmp_path):
    """file(name, **tensors) -> a capture file."""

    def write(name, **tensors):
        order = {debug.ORDER: json.dumps(list(tensors))}
        safetensors.torch.save_file(tensors, tmp_path / name, metadata=order)
        return tmp_path / name

    return write


@pytest.mark.parametrize("turned", [False, True], ids=["first", "second"])
def test_a_tensor_that_only_one_of_two_has_differs(file, capsys, turned):
    less = file("less", **{"1.a.activation": torch.ones(3)})
    names = "1.a.activation", "1.b.activation"
    more = file("more", **{name: torch.ones(3) for name in names})
    pair = (more, less) if turned else (less, more)
    assert compare(*pair) == 1
    assert capsys.readouterr().out.endswith("the first that differs: 1.b.activation\n")


@pytest.mark.parametrize("turned", [False, True], ids=["first", "second"])
def test_a_damaged_capture_is_bad_input_no_difference(file, tmp_path, capsys, turned):
    good, tensor = file("good", a=torch.ones(3)), {"a": torch.ones(3)}
    bad = {name: tmp_path / name for name in ("torn", "foreign", "folder")}
    bad["torn"].write_bytes(good.read_bytes()[:-3])
    safetensors.torch.save_file(tensor, bad["foreign"])
    for path in bad.values():
        assert compare(*[good, path][:: -1 if turned else 1]) == 2
        said = capsys.readouterr().err
        assert said.startswith("bert compare-captures: error: ")
        assert str(path) in said
        assert said.count("\n") == 1


def test_a_missing_gradient_counts_as_zero(file):
    names = "a.gradient", "a.activation"
    never = file("never", **{name: torch.empty(0) for name in names})
    for value, worst in ((0.0, 0.0), (2.0, 2.0)):
        both = torch.full((3,), value), torch.zeros(3)
        came = file("came", **dict(zip(names, both, strict=True)))
        for one, other in ((never, came), (came, never)):
            found = {name: most for name, most, _ in debug.differences(one, other)}
            assert found == {"a.gradient": worst, "a.activation": float("inf")}


def test_the_trace_has_the_steps_from_the_first_to_the_last(tmp_path):
    trace = tmp_path / "run" / "trace.json"
    step = ProfiledStep((2, 3), trace, lambda batches, lr: torch.ones(batches, 1) @ torch.ones(1, 1))  # fmt: skip
    for number in range(1, 6):
        step(number, 0.0)
        assert trace.parent.exists() == (number >= 3)
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::matmul" for event in events) == 2


def test_what_cannot_be_captured_or_traced_is_refused_before_the_run(tmp_path):
    folder, nowhere = rundir.RunConfig(run_dir=tmp_path), rundir.RunConfig()
    capture = CaptureConfig(capture=True)
    capture.check(folder, uses_graph=False)
    form = r"PROFILE_STEPS='.*': expected the first and the last step"
    for config, arguments, said in (
        (capture, (nowhere, False), "CAPTURE writes to RUN_DIR"),
        (capture, (folder, True), "set CUDA_GRAPH=0"),
        (CaptureConfig(steps=2), (folder, False), "CAPTURE_STEPS=2 and CAPTURE is not"),
        (ProfileConfig(steps="2,3"), (folder, 2), "PROFILE_STEPS=2,3: .* takes 2 steps"),
        (ProfileConfig(steps="2,3"), (nowhere, 8), "PROFILE_STEPS writes to RUN_DIR"),
        *((ProfileConfig(steps=s), (folder, 8), form) for s in ("3", "3,2", "0,1", "a,b")),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            config.check(*arguments)
