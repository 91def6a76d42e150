"""The fp8 feed-forward as one function: bit for bit what the separate kernels and casts give."""

import dataclasses

import pytest
import torch

from bert import kernels
from bert.kernels.fp8 import BACKWARD, FORWARD
from bert.kernels.fp8 import linear as fp8_linear
from bert.kernels.operations import dropout_add_layer_norm, fp8_feed_forward
from bert.kernels.support import launches, triton_support
from bert.kernels.support.dropout import DropoutSites, ForwardPass
from bert.model.config import BertConfig
from bert.model.encoder import Encoder
from common.env import ConfigError

from ..plain import CPU, NO_DROPOUT, alone
from ..states import same
from . import fp8_cases
from .fp8_cases import new_target, relative_difference

CONFIG = BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
                    max_position_embeddings=16, initializer_range=0.2)  # fmt: skip
ALONE = alone()
SEPARATE_CASTS = "embeddings,dropout_add_layer_norm,bias_gelu"
CASTS_IN_KERNELS = f"{SEPARATE_CASTS},fp8_cast"


@pytest.mark.parametrize(
    "approximate", ["tanh", pytest.param("none", marks=pytest.mark.slow)]
)
def test_casts_in_kernels_equal_separate_ones_in_bits(approximate, device, monkeypatch):
    # So that several tiles lie both ways, some of them in part.
    small = launches.Blocks(rows=16, columns=32)
    monkeypatch.setitem(launches.TABLE, "cast", {0: small})
    found = fp8_cases.differences(device, 32, 48, 64, approximate)
    assert found.pop(fp8_cases.OTHER_ORDER) <= fp8_cases.ORDER_TOLERANCE
    found |= fp8_cases.evaluation_differences(device, 16, 32, 32)
    assert max(found.values()) <= _tolerance(device), found


def _tolerance(device) -> float:
    """On a GPU the compiler may contract the arithmetic of two kernels differently."""
    return 0.0 if device.type == "cpu" else fp8_cases.TOLERANCE


def test_the_output_projection_is_in_fp8_on_request_alone():
    """Its scales follow those of the other products, which keep their numbers; those of a
    checkpoint without it are measured again.
    """
    plain, trial = (_encoder("none", CPU, trials=of) for of in ((), ["projection"]))
    (before, after), layers = (_run(one, CPU) for one in (plain, trial)), 2
    assert len(before["largest magnitudes"]) == 3 * layers
    assert len(after["largest magnitudes"]) == 4 * layers
    assert (after["largest magnitudes"] > 0).all()
    for name in ("result", "gradient of the input"):
        error = relative_difference(after[name], before[name])
        assert 0 < error < 0.4, name  # gradients have two bits, in two layers
    trial.fp8_scaling.load_state_dict(plain.fp8_scaling.state_dict())
    assert not trial.fp8_scaling.calibrated


@pytest.mark.gpu
def test_casts_in_kernels_equal_separate_ones_at_real_size(gpu):
    found = fp8_cases.differences(gpu, *fp8_cases.LARGE)
    assert found.pop(fp8_cases.OTHER_ORDER) <= fp8_cases.ORDER_TOLERANCE
    assert max(found.values()) <= fp8_cases.TOLERANCE, found


def _encoder(fused, device, config=CONFIG, trials=()):
    choice = kernels.KernelsConfig(fused=fused, attention="sdpa_loop")
    encoder = Encoder(config, kernels.bind_kernels(choice, device))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            spread = 1.0 if parameter.ndim == 1 else 0.2
            drawn = spread * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn + (".LayerNorm.w" in name))
    encoder.to(device, torch.bfloat16)
    encoder.use_fp8(device, trials)
    return encoder


def _input(device, tokens):
    x = _draw(3, tokens, device)
    offsets = torch.tensor([0, 5, tokens], dtype=torch.int32, device=device)
    return x, ForwardPass(offsets, 16)


def _draw(seed, tokens, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 32, generator=generator).to(device, torch.bfloat16)


def _run(encoder, device, tokens=16, factor=1e-3):
    """Result, every gradient, and the magnitudes seen, by name; the same numbers and masks each time."""
    x, forward_pass = _input(device, tokens)
    x.requires_grad_()
    torch.manual_seed(3)
    y = encoder(x, forward_pass)
    y.backward(factor * _draw(4, tokens, device))
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    seen = encoder.fp8_scaling.largest.clone()
    found = {"result": y.detach(), "gradient of the input": x.grad}
    return found | {"largest magnitudes": seen} | gradients


@pytest.fixture(scope="module")
def scales():
    """Scales that a first step measures on plain PyTorch."""
    encoder = _encoder("none", CPU)
    _run(encoder, CPU)
    encoder.fp8_scaling.update(ALONE)
    return {**encoder.fp8_scaling.state_dict(), "calibrated": True}


@pytest.mark.parametrize(
    ("fused", "tokens", "separate_casts"),  # of activations, in both passes
    [
        ("none", 13, 12),
        ("none", 16, 12),
        # Of the embeddings, and of the last layer's few rows.
        (CASTS_IN_KERNELS, 16, 1 + 3),
        (CASTS_IN_KERNELS, 13, 12),
    ],
)
def test_an_evaluation_is_the_forward_pass_of_training_without_dropout_bit_for_bit(
    fused, tokens, separate_casts, scales, device, monkeypatch
):
    config = dataclasses.replace(CONFIG, **NO_DROPOUT)
    encoder = _encoder(fused, device, config)
    encoder.fp8_scaling.load_state_dict(scales)
    expected = _run(encoder, device, tokens)["result"]
    encoder.fp8_scaling.largest.zero_()
    before = [tensor.clone() for tensor in encoder.fp8_scaling.state_tensors()]
    unneeded = lambda *_, **named: pytest.fail("what only a backward pass needs")  # noqa: E731
    for module in (fp8_linear, fp8_feed_forward):
        monkeypatch.setattr(module, "cast_transpose", unneeded)
    gelu_cast = fp8_feed_forward.gelu_cast

    def rows_alone(*args, rows_alone=False):
        return gelu_cast(*args, rows_alone=True) if rows_alone else unneeded()

    monkeypatch.setattr(fp8_feed_forward, "gelu_cast", rows_alone)
    cast_rows, casts = fp8_linear.cast_rows, []
    noted = lambda *args, **out: casts.append(out) or cast_rows(*args, **out)  # noqa: E731
    monkeypatch.setattr(fp8_linear, "cast_rows", noted)
    encoder.eval()
    with torch.no_grad(), encoder.fp8_evaluation(calibrated=False):
        found = encoder(*_input(device, tokens))
        # No multiple of 16 at the end.
        some = encoder(*_input(device, tokens), torch.tensor([1, 4, 9], device=device))
    assert torch.equal(found, expected)
    assert torch.equal(some, expected[[1, 4, 9]])
    assert casts.count({}) == separate_casts
    assert same(before, [*encoder.fp8_scaling.state_tensors()])


@pytest.fixture
def together(monkeypatch):
    """A list that has an entry for each time that the feed-forward ran as one function."""
    calls, plain = [], fp8_feed_forward.feed_forward
    counted = lambda *args: calls.append(1) or plain(*args)  # noqa: E731
    monkeypatch.setattr(fp8_feed_forward, "feed_forward", counted)
    return calls


def test_encoder_with_casts_in_kernels_is_the_one_with_separate_casts_bit_for_bit(
    scales, device, together
):
    outcomes = []
    for fused, expected_calls in ((SEPARATE_CASTS, 0), (CASTS_IN_KERNELS, 2)):
        encoder = _encoder(fused, device)
        encoder.fp8_scaling.load_state_dict(scales)
        outcomes.append(_run(encoder, device))
        assert len(together) == expected_calls
    separate, joined = outcomes
    assert (separate["largest magnitudes"] > 0).all()
    for name, tensor in separate.items():
        if name.endswith("intermediate.dense.bias"):  # a sum in another order
            close = {"rtol": 2.0**-7, "atol": 2.0**-7 * float(tensor.abs().max())}
            torch.testing.assert_close(joined[name], tensor, **close)
        else:
            assert torch.equal(joined[name], tensor), name


@pytest.mark.parametrize(
    "why", ["first step", "rows no multiple of 16", "evaluation", "GELU not fused"]
)
def test_where_kernels_cannot_cast_the_casts_are_separate(
    why, scales, device, together, monkeypatch
):
    without_gelu = "embeddings,dropout_add_layer_norm"
    fused = without_gelu if why == "GELU not fused" else CASTS_IN_KERNELS
    encoder = _encoder(fused, device)
    if why != "first step":
        encoder.fp8_scaling.load_state_dict(scales)
    # Only the choice is looked at: whatever runs, runs on plain operations.
    plain = _encoder("none", CPU)
    for mine, other in zip(encoder.modules(), plain.modules(), strict=True):
        if hasattr(mine, "kernel"):
            mine.kernel = other.kernel
    monkeypatch.setattr(triton_support, "supported", lambda device: False)
    encoder.train(why != "evaluation")
    _run(encoder, device, tokens=13 if why.startswith("rows") else 16)
    assert not together


@pytest.mark.parametrize("place", ["activation", "gradient"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_makes_the_step_so_and_leaves_the_scales(place, bad, scales):
    encoder = _encoder("none", CPU)
    encoder.fp8_scaling.load_state_dict(scales)
    if place == "activation":
        with torch.no_grad():
            encoder.layer[0].intermediate.dense.bias[3] = bad
    _run(encoder, CPU, factor=bad if place == "gradient" else 1e-3)
    assert not encoder.fp8_scaling.update(ALONE)
    assert torch.isfinite(encoder.fp8_scaling.scales).all()


def test_every_kernel_that_casts_lets_nan_through(device):
    new = {"dtype": torch.bfloat16, "device": device}
    x, gradient = torch.ones(16, 32, **new), torch.ones(16, 32, **new)
    weight = torch.ones(32, **new)
    poisoned = x.clone()
    poisoned[3, 5] = float("nan")
    drop = DropoutSites(device).next(0.0)
    kinds = (FORWARD, BACKWARD) * 2
    targets = [new_target(dtype, 1.0, device) for dtype in kinds]
    casts = [
        fp8_feed_forward.gelu_cast(poisoned, weight, "none", targets[0])[0],
        fp8_feed_forward.gelu_backward_cast(poisoned, x, weight, "none", targets[1])[0],
    ]
    norm = dropout_add_layer_norm
    operands = norm.Operands(poisoned, weight, x, weight, weight)
    _, _, cast, saved = norm.start_forward(operands, 1e-12, drop, targets[2])
    casts += [cast, norm.start_backward(saved, drop, [gradient], targets[3]).x]
    for number, (cast, target) in enumerate(zip(casts, targets, strict=True)):
        nan = cast.float().isnan()
        assert nan[3, 5], number
        # LayerNorm spreads it over the row, and no further.
        assert nan[3].all() or nan.sum() == 1, number
        assert not nan[4].any()
        assert target.largest.isnan(), number


def test_casts_in_kernels_without_these_kernels_are_refused(device):
    asked = kernels.KernelsConfig(fused="dropout_add_layer_norm,fp8_cast")
    with pytest.raises(ConfigError, match="FUSED=fp8_cast requires bias_gelu"):
        kernels.bind_kernels(asked, device)
