"""The fp8 feed-forward as one function: bit for bit what the separate kernels and casts give."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from bert import kernels
from bert.core.dist import DistConfig, World
from bert.kernels import fp8
from bert.kernels.fp8 import BACKWARD, FORWARD
from bert.kernels.fp8 import linear as fp8_linear
from bert.kernels.operations import dropout_add_layer_norm, fp8_feed_forward
from bert.kernels.support import launches, triton_support
from bert.kernels.support.dropout import DropoutSites, ForwardPass
from bert.model.config import BertConfig
from bert.model.encoder import Encoder
from common.env import ConfigError

from ..plain import NO_DROPOUT
from . import fp8_cases
from .fp8_cases import new_target

CONFIG = BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=80,
                    max_position_embeddings=16, initializer_range=0.2)  # fmt: skip
CPU = torch.device("cpu")
ALONE = World(DistConfig(device="cpu"))
SEPARATE_CASTS = "embeddings,dropout_add_layer_norm,bias_gelu"
CASTS_IN_KERNELS = f"{SEPARATE_CASTS},fp8_cast"


@pytest.mark.parametrize(
    "approximate", ["tanh", pytest.param("none", marks=pytest.mark.slow)]
)
def test_casts_in_kernels_equal_separate_ones_bit_for_bit(
    approximate, device, monkeypatch
):
    # So that several tiles lie both ways, some of them in part.
    small = launches.Blocks(rows=16, columns=32)
    monkeypatch.setitem(launches.TABLE, "cast", {0: small})
    found = fp8_cases.differences(device, 32, 48, 80, approximate)
    assert found.pop(fp8_cases.OTHER_ORDER) <= fp8_cases.ORDER_TOLERANCE
    # On a GPU the compiler may contract the arithmetic of two kernels differently.
    if device.type == "cpu":
        assert set(found.values()) == {0.0}, found
    assert max(found.values()) <= fp8_cases.TOLERANCE, found


def test_the_chain_of_an_evaluation_is_that_of_training_and_a_stale_weight_shows(
    device, monkeypatch
):
    found = fp8_cases.evaluation_differences(device, 16, 32, 32)
    assert max(found.values()) <= (
        0.0 if device.type == "cpu" else fp8_cases.TOLERANCE
    ), found
    hold = fp8_linear.Fp8Linear.hold
    monkeypatch.setattr(
        fp8_linear.Fp8Linear, "hold", lambda self, weight: hold(self, weight * 1.1)
    )
    assert (
        min(fp8_cases.evaluation_differences(device, 16, 32, 32).values())
        > fp8_cases.TOLERANCE
    )


def test_the_output_projection_is_in_fp8_on_request_alone():
    """Its scales follow those of the other products, which keep their numbers; those of a
    checkpoint without it are measured again.
    """
    plain, trial = (
        _encoder("none", CPU, trials=trials) for trials in ((), ["projection"])
    )
    results = [_run(encoder, CPU) for encoder in (plain, trial)]
    layers = len(plain.layer)
    seen = [result["largest magnitudes"] for result in results]
    assert [len(largest) for largest in seen] == [3 * layers, 4 * layers]
    assert (seen[1] > 0).all()
    assert not torch.equal(results[0]["result"], results[1]["result"])
    for name in ("result", "gradient of the input"):
        value = results[0][name]
        error = (results[1][name] - value).norm() / value.norm()
        assert error < 0.4, name  # gradients have two bits, in two layers
    trial.fp8_scaling.load_state_dict(plain.fp8_scaling.state_dict())
    assert not trial.fp8_scaling.calibrated


@pytest.mark.gpu
def test_casts_in_kernels_equal_separate_ones_at_real_size(gpu):
    found = fp8_cases.differences(gpu, *fp8_cases.LARGE)
    assert found.pop(fp8_cases.OTHER_ORDER) <= fp8_cases.ORDER_TOLERANCE
    assert max(found.values()) <= fp8_cases.TOLERANCE, found


def _encoder(fused, device, config=CONFIG, trials=()):
    encoder = Encoder(
        config,
        kernels.bind_kernels(
            kernels.KernelsConfig(fused=fused, attention="sdpa_loop"), device
        ),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            spread = 1.0 if parameter.ndim == 1 else 0.2
            parameter.copy_(
                spread * torch.randn(parameter.shape, generator=generator)
                + (".LayerNorm.w" in name)
            )
    encoder.to(device, torch.bfloat16)
    encoder.use_fp8(device, trials)
    return encoder


def _input(device, tokens):
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(3)).to(
        device, torch.bfloat16
    )
    return x, ForwardPass(
        torch.tensor([0, 5, tokens], dtype=torch.int32, device=device), 16
    )


def _run(encoder, device, tokens=16, factor=1e-3):
    """Result, every gradient, and the magnitudes seen, by name; the same numbers and masks each
    time.
    """
    x, forward_pass = _input(device, tokens)
    x.requires_grad_()
    generator = torch.Generator().manual_seed(4)
    upstream = (factor * torch.randn(tokens, 32, generator=generator)).to(
        device, torch.bfloat16
    )
    torch.manual_seed(3)
    y = encoder(x, forward_pass)
    y.backward(upstream)
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    seen = encoder.fp8_scaling.largest.clone()
    return {
        "result": y.detach(),
        "gradient of the input": x.grad,
        "largest magnitudes": seen,
        **gradients,
    }


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
    monkeypatch.setattr(
        fp8_linear,
        "cast_rows",
        lambda *args, **out: casts.append(out) or cast_rows(*args, **out),
    )
    encoder.eval()
    with torch.no_grad(), encoder.fp8_evaluation(calibrated=False):
        found = encoder(*_input(device, tokens))
        # No multiple of 16 at the end.
        some = encoder(*_input(device, tokens), torch.tensor([1, 4, 9], device=device))
    assert torch.equal(found, expected)
    assert torch.equal(some, expected[[1, 4, 9]])
    assert casts.count({}) == separate_casts
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, encoder.fp8_scaling.state_tensors(), strict=True)
    )


def _watched(encoder, device, monkeypatch, **arguments):
    """The outcome of a pass, and how often the feed-forward ran as one function."""
    calls = []
    plain = fp8_feed_forward.feed_forward
    monkeypatch.setattr(
        fp8_feed_forward, "feed_forward", lambda *a: calls.append(1) or plain(*a)
    )
    outcome = _run(encoder, device, **arguments)
    monkeypatch.undo()
    return outcome, len(calls)


def test_encoder_with_casts_in_kernels_is_the_one_with_separate_casts_bit_for_bit(
    scales, device, monkeypatch
):
    outcomes = []
    for fused, expected_calls in ((SEPARATE_CASTS, 0), (CASTS_IN_KERNELS, 2)):
        encoder = _encoder(fused, device)
        encoder.fp8_scaling.load_state_dict(scales)
        outcome, calls = _watched(encoder, device, monkeypatch)
        assert calls == expected_calls
        outcomes.append(outcome)
    separate, together = outcomes
    assert (separate["largest magnitudes"] > 0).all()
    for name, tensor in separate.items():
        if name.endswith("intermediate.dense.bias"):  # a sum in another order
            torch.testing.assert_close(
                together[name],
                tensor,
                rtol=2.0**-7,
                atol=2.0**-7 * float(tensor.abs().max()),
            )
        else:
            assert torch.equal(together[name], tensor), name


@pytest.mark.parametrize("fused", ["none", CASTS_IN_KERNELS])
def test_sums_are_fast_forward_and_exact_backward_in_every_product(
    fused, device, monkeypatch
):
    encoder = _encoder(fused, device)
    encoder.fp8_scaling.calibrated = True
    # By whether the product is of the forward pass.
    found: dict[bool, list[bool]] = {True: [], False: []}

    def recorded(*args, **named):
        given = inspect.signature(product).bind(*args, **named).arguments
        found[given["a"].dtype == given["b"].dtype == FORWARD].append(given["fast"])
        return product(*args, **named)

    product = fp8.product
    for module in (fp8_linear, fp8_feed_forward):
        monkeypatch.setattr(module, "product", recorded)
    _run(encoder, device)
    each = CONFIG.num_hidden_layers * 3  # QKV, two of the feed-forward
    assert found == {True: [True] * each, False: [False] * 2 * each}


@pytest.mark.parametrize(
    "why", ["first step", "rows no multiple of 16", "evaluation", "GELU not fused"]
)
def test_where_kernels_cannot_cast_the_casts_are_separate(
    why, scales, device, monkeypatch
):
    fused = (
        "embeddings,dropout_add_layer_norm"
        if why == "GELU not fused"
        else CASTS_IN_KERNELS
    )
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
    _, calls = _watched(
        encoder, device, monkeypatch, tokens=13 if why.startswith("rows") else 16
    )
    assert calls == 0


@pytest.mark.parametrize("place", ["activation", "gradient"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_makes_the_step_not_finite_and_leaves_the_scales(
    place, bad, scales
):
    encoder = _encoder("none", CPU)
    encoder.fp8_scaling.load_state_dict(scales)
    if place == "activation":
        with torch.no_grad():
            encoder.layer[0].intermediate.dense.bias[3] = bad
    _run(encoder, CPU, factor=bad if place == "gradient" else 1e-3)
    assert not encoder.fp8_scaling.update(ALONE)
    assert torch.isfinite(encoder.fp8_scaling.scales).all()


def test_every_kernel_that_casts_lets_nan_through(device):
    x, gradient, weight = (
        torch.ones(shape, dtype=torch.bfloat16, device=device)
        for shape in ((16, 32),) * 2 + (32,)
    )
    poisoned = x.clone()
    poisoned[3, 5] = float("nan")
    drop = DropoutSites(device).next(0.0)
    targets = [
        new_target(dtype, 1.0, device)
        for dtype in (FORWARD, BACKWARD, FORWARD, BACKWARD)
    ]
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
    with pytest.raises(
        ConfigError,
        match="FUSED=fp8_cast requires bias_gelu: add that, or drop fp8_cast",
    ):
        kernels.bind_kernels(
            kernels.KernelsConfig(fused="dropout_add_layer_norm,fp8_cast"), device
        )
