"""A step's arithmetic: overflow, clipping, accumulation, sharded runs of ``python -m bert``."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bert.core.dist import DistConfig, HangError, World
from bert.kernels.precision import LossScaler, PrecisionConfig
from bert.pretraining.config import PretrainingConfig
from bert.training.loop import StepCounter
from bert.training.schedule import learning_rate
from common.env import ConfigError, from_env

from ..plain import CPU, model_of, step_of
from ..states import same


def _step(tiny, precision="fp32", shard=False, accumulate=False, dtype=torch.float32, **settings):  # fmt: skip
    model = model_of(tiny, dtype=dtype)
    numerics = PrecisionConfig(precision=precision, init_loss_scale=1024.0).resolve(CPU)
    return model, step_of(model, numerics, None, accumulate, sharded=shard, **settings)


def _weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_overflow_skips_the_step_and_halves_scale(shard, tiny, make_records, batch_of):
    model, step = _step(tiny, "fp16", shard)
    batch = batch_of(make_records(3), range(4))
    assert step([batch], 0.01).finite
    before, scale = _weights(model), float(step.scaler.scale)
    state = [tensor.clone() for tensor in step.optimizer.state_tensors()]
    weight = model.bert.pooler.dense.weight
    poison = weight.register_hook(lambda gradient: gradient * float("inf"))
    assert not step([batch], 0.01).finite
    poison.remove()
    assert same(_weights(model), before)
    assert same(state, [*step.optimizer.state_tensors()])
    assert float(step.scaler.scale) == scale / 2
    assert int(step.scaler.num_skipped_steps) == 1
    assert step([batch], 0.01).finite
    assert not torch.equal(weight, before["bert.pooler.dense.weight"])


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_norm_and_losses_are_means_of_the_micro_batches_the_norm_before_it_is_clipped_and_without_the_loss_scale(
    shard, precision, tiny, make_records, batch_of
):
    model, step = _step(tiny, precision, shard, max_grad_norm=1e-3)
    model.eval()
    batch = batch_of(make_records(3), range(4))
    norm = step([batch], 0.0).norm
    twice = step([batch, batch], 0.0)
    plain, _ = _step(tiny)
    plain.eval()
    losses = plain(batch)
    (losses.mlm + losses.nsp).backward()
    expected = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    measured = torch.stack([norm, twice.norm, *twice.losses])
    known = torch.stack([expected, expected, *losses]).detach()
    rtol = 1e-5 if precision == "fp32" else 2e-2
    torch.testing.assert_close(measured, known, rtol=rtol, atol=0)


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_clipping_before_the_sum_is_not_after_it(shard, tiny, make_records, batch_of):
    records = make_records(6)
    batches = [batch_of(records, range(begin, begin + 4)) for begin in (0, 4)]
    ends = []
    for clip in ("before", "after"):
        model, step = _step(tiny, shard=shard, accumulate=True, clip=clip, optimizer="adamw")  # fmt: skip
        model.eval()
        for _ in range(2):
            assert step(batches, 0.02).norm > 1.5
        ends.append(_weights(model)["bert.encoder.layer.0.intermediate.dense.weight"])
    assert (ends[0] - ends[1]).norm() > 1e-3 * ends[1].norm()


def test_gradient_clipped_by_nan_leaves_nothing_behind(tiny, make_records, batch_of):
    _, step = _step(tiny, "fp16", shard=True)
    batch = batch_of(make_records(3), range(4))
    assert step([batch], 0.01).finite
    # CLIP=before, a rank that overflowed.
    step.optimizer.buckets.add_received(torch.tensor(float("nan")), True)
    assert step([batch], 0.01).finite


class _Watch(TorchDispatchMode):
    """Counts operators, and those that wait for the device or copy from the host, which a graph cannot record."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "index.Tensor", "index_put")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.seen, self.waiting = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen += 1
        if any(name in str(function) for name in self.WAITING):
            self.waiting.add(str(function))
        return function(*args, **(kwargs or {}))


def _read(_):
    pytest.fail("the host read a tensor")


def _attention_without_reading_the_lengths(qkv, forward_pass, dropout):
    tokens = torch.arange(qkv.shape[0], dtype=torch.int32)
    bounds = forward_pass.cu_seqlens[1:].contiguous()
    sequence = torch.searchsorted(bounds, tokens, right=True)
    query, key, value = qkv.permute(1, 2, 0, 3).unsqueeze(1)
    mask = sequence[:, None] == sequence[None, :]
    given = {"attn_mask": mask, "dropout_p": dropout}
    attention = torch.nn.functional.scaled_dot_product_attention
    context = attention(query, key, value, **given)
    return context[0].transpose(0, 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_nothing_in_a_step_waits_for_the_device(
    precision, shard, tiny, make_records, batch_of, monkeypatch
):
    model, step = _step(tiny, precision, shard, accumulate=True)
    batch = batch_of(make_records(2), range(3))
    with _Watch() as control:
        float(torch.ones(()))
    assert control.waiting == {"aten._local_scalar_dense.default"}
    for layer in model.bert.encoder.layer:
        layer.attention.self.attention = _attention_without_reading_the_lengths
    if precision == "fp8":
        step.fp8.calibrated = True
    monkeypatch.setattr(torch.Tensor, "tolist", _read)
    with _Watch() as watch:
        step.run([batch, batch])
    assert watch.seen > 300
    assert not watch.waiting


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_fp8_step_that_saw_nan_is_not_finite(bad, tiny, make_records, batch_of):
    model, step = _step(tiny, "fp8")
    batch = batch_of(make_records(3), range(4))
    assert step([batch], 0.01).finite
    # Inf is cut off to the format's largest number, so that it would not show in the gradients.
    model.bert.encoder.layer[0].intermediate.dense.weight.data[3, 5] = bad
    assert not step([batch], 0.01).finite
    assert torch.isfinite(step.fp8.scales).all()


def test_fp8_refuses_sizes_that_no_hardware_takes(tiny):
    model, _ = _step(tiny)
    said = "fp8 takes multiples of 16, not hidden_size=24, intermedi"
    with pytest.raises(ConfigError, match=said):
        model.bert.encoder.use_fp8(torch.device("cuda"))


def test_the_rate_of_a_step_after_overflows_and_batches_left_out_is_computed_without_waiting_for_the_device(
    prepared, monkeypatch
):
    config = from_env(PretrainingConfig, prepared | {"PRECISION": "fp16"})
    rate = lambda step: learning_rate(step, config.schedule)  # noqa: E731
    scaler = LossScaler(config.numerics)
    steps = StepCounter(rate, config.max_steps, scaler)
    monkeypatch.setattr(torch.Tensor, "tolist", _read)
    rates = []
    with _Watch() as watch:
        for finite in (True, None, False, True):
            if finite is None:
                steps.leave_out()
                continue
            rates.append(steps.begin())
            scaler.update(torch.tensor(finite))
    assert watch.waiting <= {"aten.lift_fresh.default"}  # of the test's own tensors
    assert [float(each) for each in rates] == pytest.approx([rate(1), rate(2), rate(2)])
    assert (steps.done, steps.batches) == (3, 4)
    assert not steps.resolve()
    assert steps.done == 2
    resumed = StepCounter(rate, config.max_steps, scaler, 2, 4)
    assert float(resumed.begin()) == pytest.approx(rate(3))


def test_micro_batches_in_16_bits_are_added_up_in_fp32_whether_sharded_or_not(
    tiny, make_records, batch_of
):
    batch, outcomes = batch_of(make_records(3), range(4)), []
    for shard in (False, True):
        given = {"accumulate": True, "max_grad_norm": 1e9}
        model, step = _step(tiny, "bf16", shard=shard, **given)
        model.eval()
        for lr in (0.01, 0.02):
            step([batch, batch, batch], lr)
        assert step.optimizer.buckets.whole.dtype == torch.float32
        outcomes.append(_weights(model))
    assert same(*outcomes)


def test_nan_in_one_gradient_is_reported_by_the_step_and_raised_by_progress(
    tiny, make_records, batch_of
):
    for shard in (False, True):
        model, step = _step(tiny, shard=shard)
        weight = model.bert.pooler.dense.weight
        weight.register_hook(lambda gradient: gradient * float("nan"))
        assert not step([batch_of(make_records(4), range(4))], 0.01).finite


def test_waiting_for_the_device_ends_with_it_or_with_the_timeout(monkeypatch):
    world = World(DistConfig(device="cpu", timeout_seconds=1))
    answers = iter([False, False, True, *10 * [False]])
    event = SimpleNamespace(query=lambda: next(answers))
    world.wait_for(event)
    clock = iter(range(100))
    monkeypatch.setattr("bert.core.dist.time.monotonic", lambda: next(clock))
    with pytest.raises(HangError, match="DIST_TIMEOUT=1"):
        world.wait_for(event)


@pytest.mark.parametrize(
    ("device", "capability", "dtype"),
    [("cuda", (7, 5), torch.float16), ("cuda", (8, 0), torch.bfloat16), ("cpu", None, torch.float32)],
)  # fmt: skip
def test_the_precision_is_what_the_device_computes_in_hardware(
    device, capability, dtype, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = PrecisionConfig(precision="auto", init_loss_scale=1024.0)
    resolved = config.resolve(torch.device(device))
    assert resolved.dtype == dtype
    assert resolved.init_loss_scale == (1024.0 if dtype == torch.float16 else None)
