"""Weight gradients are written to offered memory, bit for bit the same, without large copies."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bert.core.dist import DistConfig, World
from bert.kernels.support import weight_gradient
from bert.optim.gradients import GradientBuckets
from bert.optim.layout import ALIGNMENT, Layout
from bert.optim.mesh import Mesh

from ..plain import model_of, step_of
from ..states import same


def _parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn(*shape, generator=generator) for shape in shapes)
    return [nn.Parameter(values.bfloat16()) for values in drawn]


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_product_leaves_its_gradient_in_the_offered_place(with_bias):
    x, weight, bias, upstream = _parameters((7, 5), (3, 5), (3,), (7, 3))
    given = bias if with_bias else None
    wanted = (x, weight, bias) if with_bias else (x, weight)
    plain = F.linear(x, weight, given)
    expected = torch.autograd.grad(plain, wanted, upstream)
    place = torch.full_like(weight, float("nan"))
    weight_gradient.set_grad_buffers([weight], [place.detach()])
    result = weight_gradient.linear(x, weight, given)
    assert torch.equal(result, plain)
    result.backward(upstream)
    assert same([p.grad for p in wanted], [*expected])
    assert weight_gradient.same_memory(weight.grad, place), "kept by autograd as it is"


def test_a_weight_that_is_used_twice_gets_the_sum():
    x, weight, upstream = _parameters((7, 5), (5, 5), (7, 5))
    twice = F.linear(F.linear(x, weight), weight)
    (expected,) = torch.autograd.grad(twice, weight, upstream)
    weight_gradient.set_grad_buffers([weight], [torch.empty_like(weight).detach()])
    once = weight_gradient.linear(x, weight, None)
    weight_gradient.linear(once, weight, None).backward(upstream)
    assert torch.equal(weight.grad, expected)
    assert not weight_gradient.GradientTarget(weight).is_set


class Copies(TorchDispatchMode):
    """Numbers that are copied or joined inside, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        kinds = "cat", "stack", "clone", "copy_", "_foreach_copy_"
        if name.removeprefix("aten::") in kinds:
            first = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            size = sum(tensor.numel() for tensor in first)
            self.numbers[name] = self.numbers.get(name, 0) + size
        return function(*args, **(kwargs or {}))


def _flat(shapes: list[tuple[int, ...]], gap: int = 0) -> list[nn.Parameter]:
    """Parameters adjacent in one tensor."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.arange(sum(sizes) + gap * len(sizes), dtype=torch.float32)
    begin, found = 0, []
    for shape, size in zip(shapes, sizes, strict=True):
        found.append(nn.Parameter(torch.empty(shape)))
        found[-1].data = flat[begin : begin + size].view(shape)
        begin += size + gap
    return found


def _joined(parameters, places):
    """Joined rows, after a backward pass, and what that has copied."""
    x, upstream = torch.randn(5, 3), torch.randn(5, sum(map(len, parameters)))
    weight_gradient.set_grad_buffers(parameters, places)
    with Copies() as copies:
        whole = weight_gradient.concat_view(*parameters)
        weight_gradient.linear(x, whole, None).backward(upstream)
    assert torch.equal(whole, torch.cat(parameters))
    parts = upstream.split([*map(len, parameters)], dim=1)
    for parameter, rows in zip(parameters, parts, strict=True):
        assert torch.allclose(parameter.grad, rows.t() @ x)
    return copies.numbers


def test_neighbours_are_joined_without_a_copy_and_their_gradients_split_without_one():
    shapes = [(2, 3), (2, 3), (4, 3)]
    parameters, places = _flat(shapes), [p.detach() for p in _flat(shapes)]
    assert not _joined(parameters, places)
    gradients = [parameter.grad for parameter in parameters]
    assert all(map(weight_gradient.same_memory, gradients, places))


@pytest.mark.parametrize("case", ["gap", "other order", "other memory", "places apart"])
def test_what_does_not_lie_side_by_side_is_concatenated(case):
    shapes = [(2, 3), (2, 3)]
    parameters = _flat(shapes, gap=1 if case == "gap" else 0)
    if case == "other order":
        parameters.reverse()
    if case == "other memory":
        # At the place that would follow, but for the memory.
        parameters[1] = _flat(shapes)[1]
        parameters[1].data += 100
    gap = case == "places apart"
    copied = _joined(parameters, [p.detach() for p in _flat(shapes, gap)])
    assert bool(copied) == (not gap)


def test_groups_lie_side_by_side_in_one_bucket_where_their_last_parameter_would():
    sizes = [1, 1024, 1024, 1024, 128, 128, 2000, 5]
    layout = Layout(sizes, 2, 4000, groups=[(1, 2, 3), (4, 5)])
    assert [b - layout.begins[1] for b in layout.begins[1:4]] == [0, 1024, 2048]
    assert layout.begins[5] - layout.begins[4] == 128
    order = [layout.begins[number] for number in (7, 6, 4, 1, 0)]
    assert order == sorted(set(order))
    buckets = {p: n for n, one in enumerate(layout.buckets) for p in one.parameters}
    assert sorted(buckets) == list(range(8))
    assert buckets[1] == buckets[2] == buckets[3]
    # A group counts as a whole.
    assert all(bucket.size <= 4000 for bucket in layout.buckets)
    spans = sorted(zip(layout.begins, sizes, strict=True))
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert all(begin % ALIGNMENT == 0 for begin in layout.begins)


def _trained(tiny, batches, precision, monkeypatch, *, offers, **settings):
    """Weights and norms after two steps, and what the last one copied."""
    torch.manual_seed(0)
    model = model_of(tiny)
    with monkeypatch.context() as patched:
        if not offers:
            patched.setattr(weight_gradient, "set_grad_buffers", lambda *_: None)
        settings = {"sharded": True} | settings
        step = step_of(model, precision, None, len(batches) > 1, **settings)
        norms = [step(batches, 0.01).norm]
        with Copies() as copies:
            norms.append(step(batches, 0.01).norm)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return weights, norms, copies.numbers


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("bf16", {"clip": "after"}),
        ("fp8", {"clip": "before"}),
        ("fp32", {"clip": "bucket"}),
        ("bf16", {"sharded": False}),  # nothing is offered
    ],
)
def test_training_is_bit_for_bit_that_with_gradients_copied(
    tiny, make_records, batch_of, monkeypatch, precision, settings
):
    records = make_records(3)
    micro_batches = [batch_of(records, range(n, n + 2)) for n in (0, 2, 4)]
    for batches in ([batch_of(records, range(4))], micro_batches):
        ours, theirs = (
            _trained(tiny, batches, precision, monkeypatch, offers=offers, **settings)
            for offers in (True, False)
        )
        assert same(ours[0] + ours[1], theirs[0] + theirs[1])
        assert "sharded" not in settings or ours[2] == theirs[2], "copied"


def test_no_gradient_of_the_encoder_is_copied(
    tiny, make_records, batch_of, monkeypatch
):
    shape = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    wide = dataclasses.replace(tiny, **shape)
    batches = [batch_of(make_records(3), range(4))]
    ours, theirs = (
        _trained(wide, batches, "bf16", monkeypatch, offers=offers)[2]
        for offers in (True, False)
    )
    weights = wide.num_hidden_layers * (4 * 32**2 + 2 * 32 * 64)
    assert theirs["aten::_foreach_copy_"] - ours["aten::_foreach_copy_"] == weights


def test_an_offer_ends_with_the_backward_pass_even_if_it_fails():
    (weight,), mesh = _parameters((128, 1)), Mesh(World(DistConfig(device="cpu")), 1)

    def offered(dtype, first, error):
        buckets = GradientBuckets([weight], Layout([128], 1, 1000), mesh, dtype, dtype, separate_receive_buffer=False)  # fmt: skip
        found = []
        with pytest.raises(error), buckets.backward_pass(first=first, reduce=False):  # noqa: PT012
            found.append(weight_gradient.GradientTarget(weight).is_set)
            if error is RuntimeError:
                raise error
        assert not weight_gradient.GradientTarget(weight).is_set
        return found[0]

    assert offered(torch.bfloat16, True, RuntimeError)
    # It would overwrite what is to be added to; sums are of another type.
    assert not offered(torch.bfloat16, False, AssertionError)
    assert not offered(torch.float32, True, AssertionError)
