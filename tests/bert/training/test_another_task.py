"""A task unknown to the package trains like pretraining: eagerly, sharded over ranks, accumulated,
resumed.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert.checkpoint.save import CheckpointConfig, load_newest, save_checkpoint
from bert.core.dist import World
from bert.data.batch import Batch, Capacity, padded
from bert.model.bert import BertModel
from bert.model.config import BertConfig
from bert.model.trainable import Trainable
from bert.training.graph import copy_batches, static_batch
from common.env import ConfigError

from ..plain import PLAIN, alone, step_of
from ..ranks import run_ranks
from ..states import same

VOCABULARY, LENGTH, ANSWER, END = 40, 12, 7, 9
SHAPE = BertConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=32, max_position_embeddings=LENGTH, initializer_range=0.2)  # fmt: skip
IGNORE = -1  # not pretraining's


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanBatch(Batch):
    """The first and the last token of each sequence's answer, relative to the sequence."""

    starts: Tensor = padded("sequences", IGNORE)
    ends: Tensor = padded("sequences", IGNORE)


class SpanLosses(NamedTuple):
    """Mean losses of a batch."""

    start: Tensor
    end: Tensor


class SpanPrediction(Trainable):
    """Finds a span in every sequence: two scores a token, softmax over the tokens of the
    sequence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel(SHAPE, PLAIN)
        del self.bert.pooler  # the task has no use for it, so it would get no gradient
        self.scores = nn.Linear(SHAPE.hidden_size, 2)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.2, generator=generator)

    def stages(self):
        return [self.bert.embeddings, *self.bert.encoder.layer, self.scores]

    def forward(self, batch: SpanBatch) -> SpanLosses:
        scores = self.scores(self.bert(batch)).float()  # (T, 2)
        tokens = torch.arange(len(scores), dtype=torch.int32)
        bounds = batch.cu_seqlens[1:].contiguous()
        sequence = torch.searchsorted(bounds, tokens, right=True)
        losses = []
        for column, labels in enumerate((batch.starts, batch.ends)):
            mine = sequence[None, :] == torch.arange(len(labels))[:, None]  # (S, T)
            table = torch.where(mine, scores[:, column], -1e4)
            whole = labels + batch.cu_seqlens[:-1]
            places = torch.where(labels == IGNORE, IGNORE, whole)
            losses.append(F.cross_entropy(table, places, ignore_index=IGNORE))
        return SpanLosses(*losses)


def span_batch(seed: int, num_sequences: int = 6) -> SpanBatch:
    """Random words with one ANSWER ... END in each sequence."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, LENGTH + 1, (num_sequences,), generator=generator)
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
    count = int(offsets[-1])
    words = torch.randint(10, VOCABULARY, (count,), generator=generator).int()
    starts = torch.randint(0, 3, (num_sequences,), generator=generator)
    ends = starts + torch.randint(1, 3, (num_sequences,), generator=generator)
    words[offsets[:-1] + starts], words[offsets[:-1] + ends] = ANSWER, END
    return SpanBatch(
        input_ids=words, segment_ids=torch.zeros_like(words), cu_seqlens=offsets, max_seqlen=LENGTH,
        position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]).int(),
        num_tokens=len(words), num_sequences=num_sequences, starts=starts, ends=ends,
    )  # fmt: skip


def _step(world: World, *, sharded: bool, accumulate=False, precision="fp32"):
    torch.manual_seed(0)
    model, settings = SpanPrediction(), {"sharded": sharded, "optimizer": "adamw"}
    return model, step_of(model, precision, world, accumulate, **settings)


def _train(step, steps, world, micro_batches=1):
    losses = []
    for number in steps:
        torch.manual_seed(number)  # dropout
        first = (number * world.size + world.rank) * micro_batches
        result = step([span_batch(first + i) for i in range(micro_batches)], 5e-3)
        assert result.finite
        assert result.norm > 0
        losses.append(result.losses)
    return losses


def _assert_learnt(losses):
    assert losses[0]._fields == ("start", "end")
    for name in losses[0]._fields:
        values = [float(getattr(loss, name)) for loss in losses]
        assert sum(values[-5:]) < 0.5 * sum(values[:5]), name


@pytest.mark.parametrize(("sharded", "micro_batches"), [(False, 1), (True, 2)])
def test_span_prediction_learns(sharded, micro_batches):
    world = alone()
    _, step = _step(world, sharded=sharded, accumulate=micro_batches > 1)
    _assert_learnt(_train(step, range(30), world, micro_batches))


def test_span_prediction_resumes_from_a_checkpoint_exactly(tmp_path):
    world, config = alone(), CheckpointConfig(directory=tmp_path, resume=True)
    whole, step = _step(world, sharded=True)
    _train(step, range(3), world)
    save_checkpoint(config, 3, step.state_dict())
    saved = copy.deepcopy(whole.state_dict())
    _train(step, range(3, 6), world)
    for sharded in (True, False):
        resumed, again = _step(world, sharded=sharded)
        again.load_state_dict(load_newest(config))
        assert same(resumed.state_dict(), saved)
    resumed, step = _step(world, sharded=True)
    step.load_state_dict(load_newest(config))
    _train(step, range(3, 6), world)
    assert same(whole.state_dict(), resumed.state_dict())


def test_fixed_sizes_fill_a_task_s_labels_with_their_own_padding():
    plain = span_batch(3)
    filled = static_batch(plain, Capacity(tokens=plain.num_tokens + 5, sequences=9))
    assert filled.starts[6:].tolist() == filled.ends[6:].tolist() == [IGNORE] * 3
    model = SpanPrediction().eval()
    for a, b in zip(model(plain), model(filled), strict=True):
        torch.testing.assert_close(a, b)
    room = Capacity(tokens=plain.num_tokens + 20, sequences=9)
    target = static_batch(span_batch(4), room)
    copy_batches([target], [static_batch(plain, room)])
    assert torch.equal(target.starts[:6], plain.starts)


def test_a_task_without_fp8_products_says_so():
    said = "PRECISION=fp8: SpanPrediction has no products in fp8"
    with pytest.raises(ConfigError, match=said):
        _step(alone(), sharded=True, precision="fp8")


def _train_and_check(world):
    _, step = _step(world, sharded=True, accumulate=True)
    _assert_learnt(_train(step, range(20), world, micro_batches=2))
    state = step.state_dict()["optimizer"]
    assert not world.is_main or "scores.weight" in state["masters"]


def test_span_prediction_learns_sharded_over_two_ranks_with_accumulation():
    run_ranks(_train_and_check, 2)
