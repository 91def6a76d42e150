"""Steps and evaluations at fixed sizes: a padded batch trains as the plain one, warming up changes no state; evaluation
in fp8 computes what training would with the current weights, and does not affect training.
"""

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bert import kernels, optim
from bert.core.dist import DistConfig, World
from bert.data.batch import PretrainingCapacity, make_batch
from bert.data.records import DataError
from bert.data.synthetic import synthetic_records
from bert.kernels.fp8 import linear as fp8_linear
from bert.kernels.precision import PrecisionConfig
from bert.kernels.support.graph_capture import CaptureError
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import initialize
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.run import run
from bert.training import evaluate, graph
from bert.training.evaluate import (
    EvaluationConfig,
    EvaluationGraph,
    Evaluator,
    _count,
    evaluation_room,
    fill_batches,
    share,
    warm_up,
)
from bert.training.graph import GraphedStep, graph_capacity, static_batch
from bert.training.step import build_step, preserved

from ...bench import cuda_rules
from .. import no_gpu
from ..plain import CPU, alone, close, model_of, step_of
from ..states import same


def test_filled_batch_has_the_losses_and_gradients_of_the_plain_one(
    tiny, make_model, make_records, batch_of
):
    records = make_records(6)
    plain = batch_of(records, range(records.num_sequences))
    room = PretrainingCapacity(tokens=7 * 48, sequences=21, masked=plain.num_masked + 5)
    filled = static_batch(plain, graph_capacity(room, 7))
    assert int(filled.cu_seqlens[-1]) == filled.input_ids.numel() > plain.num_tokens
    assert int(filled.cu_seqlens.diff().max()) <= plain.max_seqlen
    results = []
    for batch in (plain, filled):
        model = make_model(tiny).eval()
        losses = model(batch)
        (losses.mlm + losses.nsp).backward()
        results.append((losses, {name: p.grad for name, p in model.named_parameters()}))
    (plain_losses, plain_gradients), (filled_losses, filled_gradients) = results
    for a, b in zip(plain_losses, filled_losses, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-13)
    close(filled_gradients, plain_gradients, 1e-12, 1e-11)


@pytest.mark.parametrize("short", ["tokens", "sequences", "masked"])
def test_batch_beyond_the_capacity_is_refused(short, make_records, batch_of):
    plain = batch_of(make_records(3), range(4))
    sizes = {"tokens": plain.num_tokens + 1, "sequences": plain.num_sequences + 1}
    sizes["masked"] = plain.num_masked
    sizes[short] -= 2
    with pytest.raises(DataError, match="raise MAX_SEQUENCES_PER_ROW"):
        static_batch(plain, PretrainingCapacity(**sizes))


NEWEST = max(cuda_rules.VERSIONS, key=lambda version: int(version.split(".")[1]))


def _step(tiny, precision, shard, device=None, backend="auto"):
    device = device or CPU
    fused = "none" if device.type == "cpu" else "auto"
    choice = kernels.KernelsConfig(fused=fused, attention=backend)
    model = BertForPreTraining(tiny, kernels.bind_kernels(choice, device))
    initialize(model, 0)
    model.to(device)
    numerics = PrecisionConfig(precision=precision, init_loss_scale=1024.0)
    world = World(DistConfig(device=device.type))
    rule = optim.OptimizerConfig(sharded=shard)
    return model, build_step(
        model, numerics.resolve(device), rule, world,
        accumulate=True, fused_update=device.type == "cuda",
    )  # fmt: skip


def _states(step):
    return [tensor.clone() for tensor in step.state_tensors()]


@pytest.fixture
def static(make_records, batch_of):
    """Four sequences at the fixed sizes of a graph."""
    room = PretrainingCapacity(tokens=4 * 48, sequences=8, masked=60)
    return static_batch(batch_of(make_records(3), range(4)), room)


@pytest.mark.parametrize(
    ("precision", "shard"), [("fp32", False), ("fp16", True), ("fp8", True)]
)
def test_steps_inside_preserved_change_neither_state_nor_random_state_nor_the_next_step(
    precision, shard, tiny, make_records, batch_of
):
    batch = batch_of(make_records(3), range(4))
    outcomes = []
    for warm in (False, True):
        model, step = _step(tiny, precision, shard)
        torch.manual_seed(4)
        # Moments, step count and scales away from their first values.
        step([batch, batch], 0.01)
        before = _states(step), dict(model.state_dict()), [torch.get_rng_state()]
        before = copy.deepcopy(before)
        addresses = [tensor.data_ptr() for tensor in step.state_tensors()]
        with preserved(step.state_tensors(), step.world.device):
            if warm:
                step([batch, batch], 0.01)
                torch.rand(3)  # a step without dropout would leave the random state
                assert not same(before[0], [*step.state_tensors()])
        after = _states(step), dict(model.state_dict()), [torch.get_rng_state()]
        assert all(map(same, before, after))
        # A graph goes on using the same memory.
        assert addresses == [tensor.data_ptr() for tensor in step.state_tensors()]
        losses, norm, finite = step([batch], 0.01)
        outcomes.append([*losses, norm, finite, *_states(step)])
    assert same(*outcomes)


def test_what_a_rollback_restores_is_copied_once_and_to_host_memory(tiny):
    """A rank that has all weights holds them and its shard of them in one tensor."""
    _, step = _step(tiny, "bf16", False)
    copies = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.name() in ("aten::_to_copy", "aten::clone"):
                copies.append((args[0].data_ptr(), (kwargs or {}).get("device")))
            return function(*args, **(kwargs or {}))

    with Seen(), step.rollback():
        pass
    sources = [tensor.data_ptr() for tensor in step.state_tensors()]
    assert len(copies) == len(set(sources)) < len(sources)
    assert {device for _, device in copies} == {torch.device("cpu")}


@pytest.mark.parametrize(
    ("precision", "version"),
    [*(("bf16", version) for version in cuda_rules.VERSIONS), ("fp8", NEWEST)],
)
def test_a_capture_that_fails_costs_the_graph_and_not_the_run(
    precision, version, monkeypatch, capsys, tiny, static
):
    """Fails as a kernel that cannot be captured, in the middle of the backward pass."""
    cuda = no_gpu.captures(monkeypatch, version)
    outcomes = []
    for fails in (False, True):
        model, step = _step(tiny, precision, True)
        torch.manual_seed(3)
        if fails:
            first = next(model.bert.encoder.layer[0].parameters())
            first.register_hook(no_gpu.uncapturable)
            given = {"graph": True, "warm_up": False}
            assert graph.capture_or_warm_up(step, lambda: [static], **given) is step
            said = capsys.readouterr().err
            assert "steps run without a CUDA graph, which failed" in said
            assert "operation not permitted when stream is capturing" in said
            assert not any(cuda.faults().values())
        losses = []
        for number in range(3):
            torch.manual_seed(number)
            losses += step([static], 0.01).losses
        outcomes.append([*losses, *_states(step)])
    assert same(*outcomes)


@pytest.mark.parametrize("steps_fail", [True, False])
def test_a_run_goes_on_without_the_graphs_that_cannot_be_recorded(
    steps_fail, prepared, monkeypatch, capsys, tmp_path
):
    """No graphs of steps and evaluations, or only none of evaluations."""

    def replayed(run, *_):
        run()
        return SimpleNamespace(replay=run)

    def refused(*_, **__):
        raise CaptureError("not permitted")

    losses = []
    for graphed in (False, True):
        if graphed:
            no_gpu.streams(monkeypatch)
            uses = property(lambda _: True)
            monkeypatch.setattr(PretrainingConfig, "uses_graph", uses)
            monkeypatch.setattr(graph, "capture", refused if steps_fail else replayed)
            monkeypatch.setattr(evaluate, "capture", refused)
        folder = tmp_path / str(graphed)
        folder.mkdir()
        every = {"RUN_DIR": str(folder), "SEED": "1", "LOG_EVERY_STEPS": "1"}
        assert run(prepared | every) in (0, 3)
        (told,) = folder.glob("metrics_*.jsonl")
        lines = map(json.loads, told.read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    failed = "steps run without a CUDA graph, which failed: not permitted"
    assert (failed in capsys.readouterr().err) is steps_fail
    assert len(losses[0]) == len(losses[1]) > 1
    # Batches are filled up all the same: other dropout.
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_evaluation_batches_hold_every_sequence_once_and_fit(count, batch_size, seed):
    records = synthetic_records(count, 48, 211, packed=False, seed=seed)
    room = evaluation_room(batch_size, 48)
    order = np.random.default_rng(seed).permutation(records.num_sequences)
    batches = fill_batches(records, order, room)
    assert sorted(np.concatenate(batches).tolist()) == sorted(order.tolist())
    for chosen in batches:
        # Raises where it does not fit.
        static_batch(make_batch(records, chosen, 48), graph_capacity(room, batch_size))


@pytest.mark.parametrize(("num_ranks", "batch_size"), [(8, 16), (8, 48), (1, 48)])
def test_evaluation_batches_are_full_and_ranks_have_equal_shares(num_ranks, batch_size):
    """10,000 sequences of Wikipedia's lengths: no rank takes a batch more than the tokens need, but for one in 100."""
    records = synthetic_records(10_100, 512, 30_522, packed=False, seed=9)
    room = evaluation_room(batch_size, 512)
    shares = [share(records, 10_000, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(10_000))
    tokens = [int(records.sequence_lengths[mine].sum()) for mine in shares]
    assert max(tokens) - min(tokens) <= 512
    for mine, of_rank in zip(shares, tokens, strict=True):
        most = np.ceil(1.01 * of_rank / room.tokens)
        assert len(fill_batches(records, mine, room)) <= most


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda", 0)


@pytest.fixture
def small():
    """Dropout, two layers, heads of 64: what the GPU kernels take."""
    return BertConfig(vocab_size=2048, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
                      intermediate_size=512, max_position_embeddings=128)  # fmt: skip


def _gpu_batches(count):
    records = synthetic_records(16 * count, 128, 2048, packed=True, seed=1)
    batches = []
    for number in range(count):
        begin, end = records.row_offsets[[8 * number, 8 * number + 8]]
        plain = make_batch(records, np.arange(begin, end), 128)
        most = int(0.15 * 8 * 128 + 12)
        room = PretrainingCapacity(tokens=8 * 128, sequences=24, masked=most)
        batches.append(static_batch(plain, graph_capacity(room, 8)).pin_memory())
    return batches


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_graph_leaves_state_alone_and_trains_as_eager_steps_do(precision, gpu, small):
    batches = _gpu_batches(6)
    torch.manual_seed(3)
    runs = {}
    for graphed in (False, True):
        _, step = _step(small, precision, True, gpu)
        take = step
        if graphed:
            before = _states(step)
            random_state = torch.cuda.get_rng_state()
            take = GraphedStep(step, batches[:2])
            assert same(before, [*step.state_tensors()])
            assert torch.equal(random_state, torch.cuda.get_rng_state())
        losses = []
        for number in range(6):
            torch.manual_seed(number)
            pair = [batches[number], batches[(number + 1) % 6]]
            losses.append([float(loss) for loss in take(pair, 1e-3).losses])
        runs[graphed] = torch.tensor(losses)
    # The same kernels and masks; attention's gradient sums in another order from run to run.
    torch.testing.assert_close(runs[True], runs[False], atol=2e-2, rtol=2e-3)
    assert not torch.equal(runs[True][0], runs[True][1])  # new inputs reach the graph


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_no_step_of_a_graph_takes_memory_beside_it(precision, gpu, small):
    batches = _gpu_batches(1)
    _, step = _step(small, precision, True, gpu)
    take = GraphedStep(step, batches)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    for _ in range(2):  # the first one of fp8 measures the scales
        take(batches, 1e-3)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - held < 2**16


@pytest.mark.gpu
def test_replays_draw_new_dropout_masks_that_the_seed_fixes(gpu, small):
    batches = _gpu_batches(1)
    _, step = _step(small, "bf16", True, gpu)
    take = GraphedStep(step, batches)
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        # A rate of 0: only the masks differ.
        losses.append(float(take(batches, 0.0).losses.mlm))
    assert losses[0] != losses[1]
    assert losses[0] == losses[2]


@pytest.mark.gpu
def test_graphed_evaluation_counts_as_the_eager_one(gpu, small):
    model, _ = _step(small, "bf16", True, gpu)
    config = EvaluationConfig(start_samples=1, every_samples=1, batch_size=8)
    graph = EvaluationGraph(config, 128, model, gpu)
    records = synthetic_records(40, 128, 2048, packed=False, seed=2)
    for chosen in fill_batches(records, np.arange(40), graph.room):
        batch = static_batch(make_batch(records, chosen, 128), graph.capacity).to(gpu)
        model.eval()
        with torch.no_grad():
            eager = _count(model, batch)
        counts = graph(batch).clone()
        whole = [0, 2, 3, 5]
        assert torch.equal(counts[whole], eager[whole])
        torch.testing.assert_close(counts[[1, 4]], eager[[1, 4]], rtol=1e-3, atol=0)


WORLD = alone()
LENGTH, RATE = 48, 0.02


class _Run:
    """A tiny model, its step, and its evaluation set."""

    def __init__(self, model, prepared, graphed=False):
        self.model = model
        self.step = step_of(model, "fp8", WORLD, sharded=True)
        self.config = evaluate.EvaluationConfig(
            evaldir=Path(prepared["EVALDIR"]), num_examples=7, batch_size=2
        )
        graph = EvaluationGraph(self.config, LENGTH, model, CPU) if graphed else None
        self.evaluator = Evaluator(
            self.config, LENGTH, model.config.vocab_size, "", WORLD, graph
        )

    def train(self, batches, numbers):
        losses = []
        for number in numbers:
            torch.manual_seed(number)
            losses.append(float(self.step([batches[number]], RATE).losses.mlm))
        return losses

    def evaluate(self):
        with self.step.gathered() as model:
            return self.evaluator(model)

    def state(self):
        held = *self.step.state_tensors(), *self.model.parameters()
        return [tensor.clone() for tensor in held]


@pytest.fixture
def fresh(tiny, make_model, prepared):
    """fresh(): a run that has taken no step; the same weights each time."""
    return lambda graphed=False: _Run(
        make_model(tiny, dtype=torch.float32), prepared, graphed
    )


@pytest.fixture
def batches(make_records, batch_of):
    """Of four steps."""
    return [batch_of(make_records(6), range(begin, begin + 4)) for begin in range(4)]


def test_training_with_evaluations_between_is_the_training_without_also_from_a_checkpoint(
    fresh, batches
):
    plain, evaluated = fresh(), fresh()
    losses = plain.train(batches, range(4))
    found = []
    for number in range(4):
        before, random_state = evaluated.state(), torch.get_rng_state()
        evaluated.evaluate()
        assert same(before, evaluated.state())
        assert torch.equal(torch.get_rng_state(), random_state)
        assert evaluated.step.needs_calibration_step == (number == 0)
        if number == 2:
            saved, evaluated = copy.deepcopy(evaluated.step.state_dict()), fresh()
            evaluated.step.load_state_dict(saved)
            evaluated.evaluate()
        found += evaluated.train(batches, [number])
    assert found == losses
    assert same(plain.state(), evaluated.state())


def test_it_is_near_bf16_which_it_is_before_the_first_step(fresh, batches):
    fp8 = fresh()

    def reference():
        model = model_of(fp8.model.config)
        model.to(torch.bfloat16).load_state_dict(fp8.model.state_dict())
        return fp8.evaluator(model)  # that never heard of fp8

    assert fp8.evaluate() == reference(), "no step has measured scales"
    fp8.train(batches, range(2))
    ours, theirs = fp8.evaluate(), reference()
    assert ours.mlm_loss != theirs.mlm_loss
    assert ours.mlm_loss == pytest.approx(theirs.mlm_loss, rel=0.02)


def test_weights_are_cast_once_and_again_for_the_next(fresh, batches, monkeypatch):
    casts = []

    def counted(x, target, out=None):
        casts.append(out is not None)
        return cast_rows(x, target, out)

    cast_rows = fp8_linear.cast_rows
    ours = fresh()
    ours.train(batches, [0])
    ours.evaluate()
    monkeypatch.setattr(fp8_linear, "cast_rows", counted)

    def places():
        users = ours.model.bert.encoder.fp8_users
        return [user.fp8.held.numbers.data_ptr() for user in users]

    before = places()
    ours.train(batches, [1])
    assert casts == []
    later = ours.evaluate()
    assert len(ours.evaluator.batches) == 4
    products = len(before)
    assert (sum(casts), len(casts)) == (products, products + 4 * products)
    assert places() == before
    other = fresh()
    other.step.load_state_dict(ours.step.state_dict())
    assert other.evaluate() == later, "of the weights as they are now"


def test_a_graph_recorded_before_the_first_step_evaluates_the_current_weights(
    fresh, batches, monkeypatch
):
    no_gpu.streams(monkeypatch)
    modes, starts = [], []

    def capture(function, stream, draws):
        """Without a GPU a replay repeats the work, in the mode in which it was recorded."""
        scaling = next(
            cell.cell_contents.bert.encoder.fp8_scaling
            for cell in function.__closure__
            if isinstance(cell.cell_contents, BertForPreTraining)
        )
        recorded = scaling.evaluates
        modes.append(recorded)
        function()

        @torch.no_grad()
        def replay():
            starts.append(1)
            now, scaling.evaluates = scaling.evaluates, recorded
            function()
            scaling.evaluates = now

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(evaluate, "capture", capture)
    graphed, eager = fresh(graphed=True), fresh()
    # Recorded as if scales were known, and that forgotten.
    assert graphed.step.needs_calibration_step
    assert modes == [True]

    def check_close(rel):
        found, expected = (dataclasses.asdict(each.evaluate()) for each in (graphed, eager))  # fmt: skip
        assert found == pytest.approx(expected, rel=rel)

    check_close(1e-3)
    # Before the first step it is in bf16, which the graph is not.
    assert not starts
    for number in (1, 2):
        assert graphed.train(batches, [number]) == eager.train(batches, [number])
        check_close(1e-4)
        assert len(starts) == number * len(graphed.evaluator.batches)


def test_a_rehearsal_computes_in_fp8_and_leaves_no_trace(fresh, monkeypatch):
    ours, modes = fresh(), []
    before = ours.state()
    monkeypatch.setattr(
        evaluate, "_count", lambda model, batch: modes.append(model.evaluates_in_fp8)
    )
    warm_up(ours.config, LENGTH, ours.model, CPU)
    assert modes == [True]
    assert ours.step.needs_calibration_step
    assert ours.model.training
    assert not ours.model.evaluates_in_fp8
    assert same(before, ours.state())
