"""Training data: every sequence once an epoch, whatever the batching (BATCHING, EXCHANGE_GROUP); random
access to steps; errors at their turn.
"""

import itertools

import numpy as np
import pytest

from bert.data.loader import LoaderConfig, make_batching
from bert.data.records import DataError
from bert.data.synthetic import synthetic_records
from common.env import ConfigError, from_env

from .samples import Files, fails_at, loader_of, sampler_of, sequences_of

LENGTH = 48
BINS = {"batching": "bins", "bin_counts": "1:1:1:1"}


def _tokens(batch):
    ends = itertools.pairwise(batch.cu_seqlens.tolist())
    return [tuple(batch.input_ids[begin:end].tolist()) for begin, end in ends]


def _sequences(records):
    return [tuple(ids.tolist()) for ids, *_ in sequences_of(records)]


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_of_batches_is_every_sequence_once(make_records, packed):
    # Steps of 4 rows cross the ends of 7.
    files = Files([make_records(7, packed, seed) for seed in range(3)])
    data = loader_of(files, batch_size=2, gradient_steps=2, packed=packed)
    steps = [data.next_step() for _ in range(int(files.row_counts().sum()) // 4)]
    data.close()
    assert {len(batches) for batches in steps} == {2}
    seen = [tokens for batches in steps for one in batches for tokens in _tokens(one)]
    everything = {tokens for one in files for tokens in _sequences(one)}
    assert len(set(seen)) == len(seen)
    assert set(seen) <= everything
    if not packed:
        assert len(seen) == 4 * len(steps)


def test_rows_of_no_sequence_are_passed_over_and_no_micro_batch_is_empty(make_records):
    records = make_records(12, False, 1)
    rows = records.with_rows([0, 0, 0, 4, 8, 8, 12, 12])
    files = Files([rows, make_records(5, True, 2)])
    data = loader_of(files, batch_size=1, packed=True, max_seq_length=512)
    steps = [data.next_step() for _ in range(int(files.row_counts().sum()))]
    data.close()
    seen = {tuple(_tokens(batch)) for batches in steps for batch in batches}
    flat = _sequences(records)
    assert {tuple(flat[begin : begin + 4]) for begin in (0, 4, 8)} <= seen
    assert all(seen)


@pytest.mark.parametrize("bad", [1, 2, 4, 9])
def test_a_step_that_cannot_be_made_is_reported_at_its_turn(make_records, bad):
    made = []
    files = Files([make_records(40, False, 1)])
    data = loader_of(files, fails_at(bad, made), batch_size=2)
    steps = [data.next_step()[0] for _ in range(bad - 1)]
    with pytest.raises(DataError, match="damaged"):
        data.next_step()
    data.close()
    assert [id(batch) for batch in steps] == [id(batch) for batch in made[: bad - 1]]


# --- BATCHING and EXCHANGE_GROUP


@pytest.fixture
def bins():
    records = synthetic_records(4000, LENGTH, 211, False, seed=0)
    bin_of = (records.sequence_lengths - 1) * 4 // LENGTH
    return Files([records.select(np.flatnonzero(bin_of == n)) for n in range(4)])


def config(**settings):
    usual = {"batch_size": 4, "gradient_steps": 2, "max_seq_length": LENGTH}
    return LoaderConfig(**usual | settings)


def batching_of(source, settings, rank=0, world=1):
    return make_batching(source, sampler_of(source, settings, 5, rank, world), settings)


def epoch_of(batching, steps):
    return [p for n in steps for chosen in batching.step(n) for p in pairs(chosen)]


def pairs(chosen):
    return list(zip(chosen.files.tolist(), chosen.sequences.tolist(), strict=True))


def lengths(source, chosen):
    found = (source[file].sequence_lengths[number] for file, number in pairs(chosen))
    return np.array([*found])


@pytest.mark.parametrize("settings", [{}, BINS, {"exchange_group": 2}])
def test_a_step_is_the_same_in_turn_and_out_of_turn(bins, settings):
    settings = config(**settings)
    in_turn, out_of_turn = (batching_of(bins, settings, world=2) for _ in range(2))
    steps = [in_turn.step(step) for step in range(1, 9)]
    expected = [[pairs(chosen) for chosen in step] for step in steps]
    for step in (7, 8, 2, 1, 5):
        found = [pairs(chosen) for chosen in out_of_turn.step(step)]
        assert found == expected[step - 1]


def test_bins_give_every_micro_batch_its_share(bins):
    settings = config(batching="bins", batch_size=16, bin_counts="6:3:2:5")
    batching = batching_of(bins, settings, world=2)
    for chosen in batching.step(3):
        assert np.bincount(chosen.files).tolist() == [6, 3, 2, 5]


def test_an_epoch_of_bins_ends_with_the_bin_that_runs_out_first(make_records):
    source = Files([make_records(rows, packed=False, seed=rows) for rows in (10, 24)])
    settings = config(batching="bins", gradient_steps=1, bin_counts="2:2")
    batching = batching_of(source, settings)
    assert len(set(epoch_of(batching, range(1, 6)))) == 20
    second = {pair for pair in epoch_of(batching, range(6, 11)) if pair[0] == 0}
    assert second == {(0, number) for number in range(10)}


def test_each_bin_is_shuffled_in_an_order_of_its_own(make_records):
    source = Files([make_records(30, packed=False, seed=3)] * 3)
    three = {"batch_size": 3, "gradient_steps": 1, "bin_counts": "1:1:1"}
    batching = batching_of(source, config(batching="bins", **three))
    epoch = epoch_of(batching, range(1, 31))
    orders = [tuple(n for file, n in epoch if file == bin_) for bin_ in range(3)]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len(set(orders)) == 3


def test_exchange_deals_the_longest_first_and_every_second_round_backwards(bins):
    settings = config(exchange_group=2)
    dealt = [batching_of(bins, settings, rank, world=2).step(3) for rank in range(2)]
    # In the order they are dealt to.
    hands = [lengths(bins, dealt[rank][micro]) for micro in range(2) for rank in (0, 1)]
    deck = sorted(np.concatenate(hands).tolist(), reverse=True)
    for place, hand in enumerate(hands):
        turns = (place, 7 - place, 8 + place, 15 - place)
        assert hand.tolist() == [deck[turn] for turn in turns]
    assert len(set(deck)) > 8  # else any deal would do


@pytest.mark.parametrize(("group", "ranks"), [(4, range(4)), (2, (2, 3))])
def test_a_group_deals_its_own_sequences_evenly(group, ranks, bins):
    def dealt(**settings):
        ours = (batching_of(bins, config(**settings), rank, world=4) for rank in ranks)
        return [chosen for batching in ours for chosen in batching.step(2)]

    before, after = dealt(), dealt(exchange_group=group)
    everything = lambda dealt: sorted(p for micro in dealt for p in pairs(micro))  # noqa: E731
    assert everything(before) == everything(after)
    assert {len(chosen.files) for chosen in after} == {4}
    tokens = [[lengths(bins, chosen).sum() for chosen in of] for of in (before, after)]
    assert np.ptp(tokens[1]) < np.ptp(tokens[0]) / 2


def test_batches_keep_within_the_capacity(bins):
    capacity = config(gradient_steps=1, **BINS).capacity
    data = loader_of(bins, lambda batch: batch.pad_to(capacity), batch_size=4, **BINS)
    for _ in range(10):
        (batch,) = data.next_step()
        assert batch.input_ids.numel() == 4 * LENGTH
    data.close()


@pytest.mark.parametrize(
    ("named", "variables"),
    [
        ("BATCHING=bins", {"BATCHING": "bins", "BIN_COUNTS": "4", "PACKED": "1"}),
        ("EXCHANGE_GROUP=8", {"EXCHANGE_GROUP": "8", "PACKED": "1"}),
        ("BIN_COUNTS='6:3:x'", {"BATCHING": "bins", "BIN_COUNTS": "6:3:x"}),
        ("rows, bins", {"BATCHING": "shuffled"}),
    ],
)
def test_settings_that_contradict_each_other_stop_at_once(named, variables):
    with pytest.raises(ConfigError, match=named):
        from_env(LoaderConfig, {"BATCHSIZE": "4", **variables})


@pytest.mark.parametrize(
    ("rows", "settings", "error", "message"),
    [
        ("packed", BINS, DataError, "BATCHING=bins"),
        ("packed", {"exchange_group": 2}, DataError, "EXCHANGE_GROUP"),
        ("plain", {"exchange_group": 3}, ConfigError, "divisor of the 2 ranks"),
        ("bins", BINS | {"bin_counts": "1:3"}, DataError, "BIN_COUNTS=1:3"),
        ("plain", BINS | {"batch_size": 30, "bin_counts": "28:1:1"}, DataError, "do not fill"),
    ],
)  # fmt: skip
def test_settings_fit_the_data(rows, settings, error, message, bins, make_records):
    plain = Files([make_records(41, packed=False, seed=seed) for seed in range(3)])
    sources = {"packed": Files([make_records(41)]), "plain": plain, "bins": bins}
    with pytest.raises(error, match=message):
        batching_of(sources[rows], config(**settings), world=2)
