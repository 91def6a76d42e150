"""MASKING=dynamic: rates, and masks that depend on seed, epoch and sequence alone."""

import dataclasses
import hashlib
import re
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from bert.__main__ import main
from bert.data.batch import make_batch
from bert.data.format import open_records, write_records
from bert.data.loader import LoaderConfig, open_masks
from bert.data.masking import DynamicMasks, MaskTokens, margin
from bert.data.records import DataError
from bert.data.sampler import Chosen
from bert.data.synthetic import synthetic_records
from bert.training.graph import graph_capacity, static_batch
from common.env import ConfigError

from ..states import folders, newest, same
from .samples import Files, loader_of, sampler_of

LENGTH, WORDS = 48, 211
CLS, SEP, MASK = 1, 2, 3
TOKENS = MaskTokens(CLS, SEP, MASK, WORDS)


def original(records):
    """The tokens before the records' own masks."""
    tokens = records.input_ids.copy()
    counts = np.diff(records.masked_lm_offsets)
    owner = np.repeat(np.arange(records.num_sequences), counts)
    places = records.sequence_offsets[owner] + records.masked_lm_positions
    tokens[places] = records.masked_lm_ids
    return tokens


def chosen_of(records, epoch=0, file=0):
    count = records.num_sequences
    return Chosen(np.full(count, file), np.arange(count), np.full(count, epoch))


@pytest.fixture(scope="module")
def many():
    """Half a million tokens of a vocabulary of 211, each sequence with [CLS] in front and [SEP] at the end."""
    records = synthetic_records(2000, 512, WORDS, False, 0)
    assert records.masked_lm_positions.all(), "none at the begin"
    records.input_ids[records.sequence_offsets[:-1]] = CLS
    records.input_ids[records.sequence_offsets[1:] - 1] = SEP
    return records


def test_masks_are_15_percent_of_the_text_80_10_10(many):
    masks = DynamicMasks(TOKENS, seed=7, capacity=10**9)
    plain = make_batch(many, np.arange(many.num_sequences), 512)
    batch = masks(plain, chosen_of(many))
    tokens, before = batch.input_ids.numpy(), original(many)
    where, labels = batch.masked_positions.numpy(), batch.masked_labels.numpy()
    assert np.array_equal(labels, before[where]), "what is predicted is what was there"
    rest = np.ones(len(tokens), dtype=bool)
    rest[where] = False
    assert np.array_equal(tokens[rest], before[rest]), "the records' own masks are gone"
    assert not np.isin(before[where], (CLS, SEP)).any()
    assert (np.diff(where) > 0).all()
    assert batch.num_masked == len(where)
    text = ~np.isin(before, (CLS, SEP))
    assert abs(len(where) / text.sum() - 0.15) < 0.003
    now = tokens[where]
    assert abs((now == MASK).mean() - 0.8) < 0.01
    assert abs((now == labels).mean() - 0.1) < 0.01
    other = now[(now != MASK) & (now != labels)]
    assert abs(len(other) / len(now) - 0.1) < 0.01
    counts = np.bincount(other, minlength=WORDS)
    assert len(counts) == WORDS
    least, mean = np.delete(counts, MASK).min(), counts.mean()
    assert 0.3 * mean < least <= counts.max() < 2 * mean
    thirds = np.array_split(np.isin(np.arange(len(tokens)), where)[text], 3)
    assert all(abs(part.mean() - 0.15) < 0.006 for part in thirds), "everywhere alike"
    # The batch given stays what it was.
    assert (plain.input_ids.numpy() == many.input_ids).all()


def test_another_epoch_file_or_seed_has_other_masks_and_the_same_the_same(many):
    plain = make_batch(many, np.arange(many.num_sequences), 512)

    def drawn(seed, epoch, file):
        batch = DynamicMasks(TOKENS, seed, 10**9)(plain, chosen_of(many, epoch, file))
        return frozenset(batch.masked_positions.tolist())

    first = drawn(7, 0, 0)
    assert drawn(7, 0, 0) == first
    for other in ((7, 1, 0), (7, 2, 0), (7, 0, 1), (8, 0, 0), (7, 0, 2**20)):
        common = len(first & drawn(*other)) / len(first)
        assert 0.13 < common < 0.17, "independent"


def test_masks_beyond_the_room_of_a_graph_are_left_out(many):
    plain = make_batch(many, np.arange(50), 512)
    given = plain, chosen_of(many.select(range(50)))
    whole, cut = (DynamicMasks(TOKENS, 7, room)(*given) for room in (10**9, 100))
    assert cut.num_masked == 100 < whole.num_masked
    assert torch.equal(cut.masked_positions, whole.masked_positions[:100])
    last = int(cut.masked_positions[-1])
    end = int(plain.cu_seqlens[-1])
    assert torch.equal(cut.input_ids[: last + 1], whole.input_ids[: last + 1])
    assert np.array_equal(cut.input_ids[last + 1 :], original(many)[last + 1 : end])


KINDS = {"packed": {"packed": True}, "unpacked": {}, "exchanged": {}}
KINDS["binned"] = {"batching": "bins", "bin_counts": "2:1:1"}


@pytest.mark.parametrize("kind", KINDS)
def test_rank_world_size_and_resumption_change_no_mask(make_records, kind):
    settings = KINDS[kind] | {"batch_size": 4, "gradient_steps": 2}
    packed = kind == "packed"
    source = Files([make_records(40, packed=packed, seed=n) for n in range(3)])
    found = defaultdict(set)  # the tokens of each epoch, file and sequence
    epochs = Counter()
    for world, rank in ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
        if kind == "exchanged":
            settings["exchange_group"] = world
        config = LoaderConfig(max_seq_length=LENGTH, masking="dynamic", **settings)
        masks = DynamicMasks(TOKENS, 5, config.capacity.masked)
        made = {"masking": "dynamic", "masks": masks, **settings}
        made["sampler"] = sampler_of(source, config, 5, rank, world)
        data = loader_of(source, **made)
        steps = [data.next_step() for _ in range(30 // world)]
        data.close()  # its thread has the batching until then
        chosen = [data.batching.step(step) for step in range(1, 30 // world + 1)]
        for batch, of in zip(chain(*steps), chain(*chosen), strict=True):
            ends = batch.cu_seqlens.numpy()[1:-1]
            parts = np.split(batch.input_ids.numpy(), ends)
            keys = np.stack([of.epochs, of.files, of.sequences], axis=1).tolist()
            for key, part in zip(keys, parts, strict=True):
                found[tuple(key)].add(tuple(part.tolist()))
                epochs[key[0]] += 1
        resumed = loader_of(source, first_step=5, **made)
        for expected, again in zip(steps[4], resumed.next_step(), strict=True):
            assert torch.equal(expected.input_ids, again.input_ids)
            assert torch.equal(expected.masked_positions, again.masked_positions)
        resumed.close()
    assert all(len(drawn) == 1 for drawn in found.values())
    assert epochs.total() > 1.5 * len(found), "most were seen by several"
    assert min(epochs[0], epochs[1]) > 30
    both = [key for key in found if key[0] == 0 and (1, *key[1:]) in found]
    differing = sum(found[key] != found[(1, *key[1:])] for key in both)
    assert differing > 0.9 * len(both) > 10, "every epoch has masks of its own"


def test_every_batch_fits_the_fixed_sizes_of_a_graph():
    source = Files([synthetic_records(800, LENGTH, WORDS, True, 0)])
    settings = {"packed": True, "masking": "dynamic", "synthetic": True}
    config = LoaderConfig(max_seq_length=LENGTH, batch_size=4, **settings)
    masks = open_masks(config, source, None, WORDS, seed=1)
    room = graph_capacity(config.capacity, 4)
    fixed = lambda one: static_batch(one, room)  # noqa: E731
    data = loader_of(source, fixed, masks=masks, batch_size=4, **settings)
    steps = (batch for _ in range(200) for batch in data.next_step())
    most = max(int((batch.masked_labels >= 0).sum()) for batch in steps)
    data.close()
    static = dataclasses.replace(config, masking="static").capacity
    masked = static.masked + margin(4 * LENGTH)
    assert config.capacity == dataclasses.replace(static, masked=masked)
    # The margin is needed, and enough.
    assert static.masked < most < config.capacity.masked


SPECIAL = "[PAD]\n[CLS]\n[SEP]\n[MASK]\n[UNK]\n"
VOCABULARY = SPECIAL + "".join(f"w{i}\n" for i in range(5, WORDS))


@pytest.fixture
def dynamic(prepared):
    """A run on records whose vocabulary exists."""
    path = Path(prepared["CHECKPOINTDIR_PHASE1"]) / "vocab.txt"
    path.write_text(VOCABULARY)
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    for name in ("DATADIR_PHASE2_PACKED", "EVALDIR"):
        for shard in Path(prepared[name]).iterdir():
            records, metadata = open_records(shard)
            write_records(shard, records, dataclasses.replace(metadata, vocab_md5=md5))
    scored = ("EVAL_ITER_START_SAMPLES", "EVAL_ITER_SAMPLES", "TARGET_MLM_ACCURACY")
    return prepared | dict.fromkeys(scored, "") | {"MASKING": "dynamic"}


def test_the_ids_are_the_vocabularys(make_records, tmp_path):
    path, source = tmp_path / "vocab.txt", Files([make_records(40)])
    config = LoaderConfig(batch_size=4, masking="dynamic", datadir=tmp_path)
    with pytest.raises(ConfigError, match="CHECKPOINTDIR_PHASE1"):
        open_masks(config, source, None, WORDS, 1)
    path.write_text("##s\n[SEP]\nb\nb\n[MASK]\r\n[CLS]\n[UNK]\n[PAD]")
    by_line = MaskTokens(cls=5, sep=1, mask=4, size=8)
    assert MaskTokens.read(path, "") == by_line
    refused = [
        ("made with another vocabulary", lambda: MaskTokens.read(path, "0" * 32)),
        ("cannot read the vocabulary", lambda: MaskTokens.read(tmp_path / "x", "")),
        ("8 tokens, .* vocab_size 7", lambda: open_masks(config, source, tmp_path, 7, 1)),
    ]  # fmt: skip
    for said, reads in refused:
        with pytest.raises(DataError, match=said):
            reads()
    path.write_text("a\n[SEP]\n")
    with pytest.raises(DataError, match=r"no \[PAD\], \[UNK\], \[CLS\], \[MASK\]"):
        MaskTokens.read(path, "")
    static = dataclasses.replace(config, masking="static")
    assert open_masks(static, source, None, 200, 1) is None


def test_the_check_names_the_masking(dynamic, capsys):
    assert main(["--check"], dynamic) == 0
    said = capsys.readouterr().out
    assert re.search(r"MASKING=dynamic: .* token 3 of 211 is \[MASK\]", said)


def test_a_resumed_run_has_the_masks_of_one_piece(dynamic, run_bert, tmp_path):
    def run(name, status=0, **more):
        place = folders(tmp_path, name)
        done = run_bert(dynamic, status=status, RESUME="1", **place, **more)
        assert "MASKING dynamic" in done.stderr or not status
        return newest(tmp_path / name)

    whole = run("whole")
    run("parts", STEPS_THIS_RUN="3")
    run("parts", 2, MASKING="static")
    assert same(run("parts"), whole)
    assert not same(run("static", MASKING="static")["model"], whole["model"])
