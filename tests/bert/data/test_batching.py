"""BATCHING and EXCHANGE_GROUP: how sequences are distributed, that none is lost, and random access
to steps.
"""

from __future__ import annotations

import numpy as np
import pytest

from bert.data.loader import LoaderConfig, TrainingData, make_batching
from bert.data.records import DataError
from bert.data.sampler import Sampler
from bert.data.synthetic import synthetic_records
from common.env import ConfigError, from_env

from .sources import Files

LENGTH = 48
BINS = {"batching": "bins", "bin_counts": "1:1:1:1"}


@pytest.fixture
def files(make_records):
    return Files([make_records(41, packed=False, seed=seed) for seed in range(3)])


@pytest.fixture
def bins():
    records = synthetic_records(4000, LENGTH, 211, False, seed=0)
    bin_of = (records.sequence_lengths - 1) * 4 // LENGTH
    source = Files(
        [records.select(np.flatnonzero(bin_of == number)) for number in range(4)]
    )
    source.bins = [np.array([number]) for number in range(4)]
    return source


def config(**settings):
    return LoaderConfig(
        **{"batch_size": 4, "gradient_steps": 2, "max_seq_length": LENGTH, **settings}
    )


def batching_of(source, settings, rank=0, world=1):
    sampler = Sampler(
        source.row_counts(), settings.rows_per_step, seed=5, rank=rank, world_size=world
    )
    return make_batching(source, sampler, settings)


def pairs(chosen):
    return list(zip(chosen.files.tolist(), chosen.sequences.tolist(), strict=True))


def lengths(source, chosen):
    return np.array(
        [source[file].sequence_lengths[number] for file, number in pairs(chosen)]
    )


@pytest.mark.parametrize("settings", [{}, BINS, {"exchange_group": 2}])
def test_a_step_is_the_same_in_turn_and_out_of_turn(bins, settings):
    settings = config(**settings)
    in_turn, out_of_turn = (batching_of(bins, settings, world=2) for _ in range(2))
    expected = [
        [pairs(chosen) for chosen in in_turn.step(step)] for step in range(1, 9)
    ]
    for step in (7, 8, 2, 1, 5):
        assert [pairs(chosen) for chosen in out_of_turn.step(step)] == expected[
            step - 1
        ]


def test_bins_give_every_micro_batch_its_share(bins):
    batching = batching_of(
        bins, config(batching="bins", batch_size=16, bin_counts="6:3:2:5"), world=2
    )
    for chosen in batching.step(3):
        assert np.bincount(chosen.files).tolist() == [6, 3, 2, 5]


def test_an_epoch_of_bins_ends_with_the_bin_that_runs_out_first(make_records):
    source = Files([make_records(rows, packed=False, seed=rows) for rows in (10, 24)])
    batching = batching_of(
        source,
        config(batching="bins", batch_size=4, gradient_steps=1, bin_counts="2:2"),
    )
    epoch = [
        pair
        for step in range(1, 6)
        for chosen in batching.step(step)
        for pair in pairs(chosen)
    ]
    assert len(set(epoch)) == 20
    second = [
        pair
        for step in range(6, 11)
        for chosen in batching.step(step)
        for pair in pairs(chosen)
    ]
    assert {pair for pair in second if pair[0] == 0} == {
        (0, number) for number in range(10)
    }


def test_each_bin_is_shuffled_in_an_order_of_its_own(make_records):
    # As many rows in each.
    source = Files([make_records(30, packed=False, seed=3) for _ in range(3)])
    batching = batching_of(
        source,
        config(batching="bins", batch_size=3, gradient_steps=1, bin_counts="1:1:1"),
    )
    epoch = [pairs(batching.step(step)[0]) for step in range(1, 31)]
    orders = [
        tuple(number for step in epoch for file, number in step if file == bin_)
        for bin_ in range(3)
    ]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len(set(orders)) == 3


def test_exchange_deals_the_longest_first_and_every_second_round_backwards(bins):
    dealt = [
        batching_of(bins, config(exchange_group=2), rank, world=2).step(3)
        for rank in range(2)
    ]
    hands = [
        [lengths(bins, dealt[rank][micro]) for rank in range(2)] for micro in range(2)
    ]
    # In the order they are dealt to.
    hands = [hands[micro][rank] for micro in range(2) for rank in range(2)]
    deck = sorted(np.concatenate(hands).tolist(), reverse=True)
    expected = [
        [deck[0], deck[7], deck[8], deck[15]],
        [deck[1], deck[6], deck[9], deck[14]],
    ]
    expected += [
        [deck[2], deck[5], deck[10], deck[13]],
        [deck[3], deck[4], deck[11], deck[12]],
    ]
    assert [hand.tolist() for hand in hands] == expected
    assert len(set(deck)) > 8  # else any deal would do


def test_exchange_deals_the_same_sequences_evenly(bins):
    plain = [batching_of(bins, config(), rank, world=4) for rank in range(4)]
    dealt = [
        batching_of(bins, config(exchange_group=4), rank, world=4) for rank in range(4)
    ]
    before = [chosen for batching in plain for chosen in batching.step(2)]
    after = [chosen for batching in dealt for chosen in batching.step(2)]
    assert sorted(pair for chosen in before for pair in pairs(chosen)) == sorted(
        pair for chosen in after for pair in pairs(chosen)
    )
    assert {len(chosen.files) for chosen in after} == {4}
    tokens = [
        [lengths(bins, chosen).sum() for chosen in micro_batches]
        for micro_batches in (before, after)
    ]
    assert np.ptp(tokens[1]) < np.ptp(tokens[0]) / 2


def test_groups_exchange_among_themselves_only(bins):
    plain = [batching_of(bins, config(), rank, world=4).step(1) for rank in (2, 3)]
    dealt = [
        batching_of(bins, config(exchange_group=2), rank, world=4).step(1)
        for rank in (2, 3)
    ]
    together = [
        {pair for batches in ranks for chosen in batches for pair in pairs(chosen)}
        for ranks in (plain, dealt)
    ]
    assert together[0] == together[1]


def test_batches_keep_within_the_capacity(bins):
    settings = config(batching="bins", bin_counts="1:1:1:1")
    sampler = Sampler(
        bins.row_counts(), settings.rows_per_step, seed=1, rank=0, world_size=1
    )
    data = TrainingData(
        bins,
        sampler,
        settings,
        211,
        first_step=1,
        pad_and_pin=lambda b: b.pad_to(settings.capacity),
    )
    for _ in range(5):
        for batch in data.next_step():
            assert batch.input_ids.numel() == 4 * LENGTH
    data.close()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"BATCHING": "bins", "BIN_COUNTS": "4", "PACKED": "1"},
            "BATCHING=bins needs records that are not packed",
        ),
        (
            {"EXCHANGE_GROUP": "8", "PACKED": "1"},
            "EXCHANGE_GROUP=8 needs records that are not packed",
        ),
        ({"BATCHING": "bins", "BIN_COUNTS": "6:3:x"}, "BIN_COUNTS='6:3:x'"),
        ({"BATCHING": "shuffled"}, "rows, bins"),
    ],
)
def test_settings_that_contradict_each_other_stop_at_once(variables, message):
    with pytest.raises(ConfigError, match=message):
        from_env(LoaderConfig, {"BATCHSIZE": "4", **variables})


def test_settings_that_do_not_fit_the_data_are_errors(files, bins, make_records):
    packed = Files([make_records(41, packed=True)])
    with pytest.raises(
        DataError, match="BATCHING=bins needs records that are not packed"
    ):
        batching_of(packed, config(**BINS))
    with pytest.raises(DataError, match="EXCHANGE_GROUP"):
        batching_of(packed, config(exchange_group=2), world=2)
    with pytest.raises(ConfigError, match="divisor of the 2 ranks"):
        batching_of(files, config(exchange_group=3), world=2)
    with pytest.raises(DataError, match="BIN_COUNTS=1:3"):
        batching_of(bins, config(batching="bins", bin_counts="1:3"))
    with pytest.raises(DataError, match="do not fill one step"):
        batching_of(files, config(batching="bins", batch_size=30, bin_counts="28:1:1"))
