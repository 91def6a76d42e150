"""A task unknown to the package trains like pretraining: eagerly, sharded over ranks, accumulated, resumed."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert.checkpoint.save import CheckpointConfig, load_newest, save_checkpoint
from bert.data.batch import Batch, Capacity, padded
from bert.model.bert import BertModel
from bert.model.config import BertConfig
from bert.model.trainable import Trainable
from bert.training.graph import copy_batches, static_batch
from common.env import ConfigError

from ..plain import PLAIN, alone, step_of
from ..ranks import run_ranks
from ..states import same

VOCABULARY, LENGTH = 40, 12
SHAPE = BertConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=32, max_position_embeddings=LENGTH, initializer_range=0.2)  # fmt: skip
IGNORE = -1  # not pretraining's


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfBatch(Batch):
    """Whether the first word of a sequence is of the upper half of the vocabulary."""

    upper: Tensor = padded("sequences", IGNORE)


class HalfLosses(NamedTuple):
    """Mean loss of a batch."""

    half: Tensor


class Half(Trainable):
    """Two scores of each sequence's first token."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel(SHAPE, PLAIN)
        del self.bert.pooler  # the task has no use for it, so it would get no gradient
        self.scores = nn.Linear(SHAPE.hidden_size, 2)

    def stages(self):
        return [self.bert.embeddings, *self.bert.encoder.layer, self.scores]

    def forward(self, batch: HalfBatch) -> HalfLosses:
        hidden = self.bert(batch)  # (T, D)
        # Sequences that fill up the sizes of a graph may be empty.
        first = batch.cu_seqlens[:-1].long().clamp(max=len(hidden) - 1)
        scores = self.scores(hidden[first]).float()  # (S, 2)
        return HalfLosses(F.cross_entropy(scores, batch.upper, ignore_index=IGNORE))


def _batch(seed: int, num_sequences: int = 6) -> HalfBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, LENGTH + 1, (num_sequences,), generator=generator)
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
    words = torch.randint(VOCABULARY, (int(offsets[-1]),), generator=generator).int()
    upper = torch.randint(2, (num_sequences,), generator=generator)
    words[offsets[:-1]] = (7 + VOCABULARY // 2 * upper).int()
    return HalfBatch(
        input_ids=words, segment_ids=torch.zeros_like(words), cu_seqlens=offsets, max_seqlen=LENGTH,
        position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]).int(), num_tokens=len(words),
        num_sequences=num_sequences, upper=upper,
    )  # fmt: skip


def _step(world, *, sharded, accumulate=False, precision="fp32"):
    torch.manual_seed(0)
    model, settings = Half(), {"sharded": sharded, "optimizer": "adamw"}
    return model, step_of(model, precision, world, accumulate, **settings)


def _train(step, steps, world, micro_batches=1):
    losses = []
    for number in steps:
        torch.manual_seed(number)  # dropout
        first = (number * world.size + world.rank) * micro_batches
        result = step([_batch(first + i) for i in range(micro_batches)], 5e-3)
        assert result.finite
        assert result.norm > 0
        losses.append(float(result.losses.half))
    return losses


def _learns(world, sharded, micro_batches):
    _, step = _step(world, sharded=sharded, accumulate=micro_batches > 1)
    losses = _train(step, range(20), world, micro_batches)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    state = step.state_dict()["optimizer"]
    assert not world.is_main or "scores.weight" in state["masters"]


def test_a_task_learns_eagerly_and_sharded_over_two_ranks_with_accumulation():
    _learns(alone(), False, 1)
    run_ranks(_learns, 2, arguments=(True, 2))


def test_a_task_resumes_from_a_checkpoint_exactly(tmp_path):
    world, config = alone(), CheckpointConfig(directory=tmp_path, resume=True)
    whole, step = _step(world, sharded=True)
    _train(step, range(3), world)
    save_checkpoint(config, 3, step.state_dict())
    _train(step, range(3, 6), world)
    for sharded in (True, False):
        resumed, step = _step(world, sharded=sharded)
        step.load_state_dict(load_newest(config))
        _train(step, range(3, 6), world)
        assert not sharded or same(whole.state_dict(), resumed.state_dict())


def test_fixed_sizes_fill_a_tasks_labels_with_their_own_padding():
    plain = _batch(3)
    filled = static_batch(plain, Capacity(tokens=plain.num_tokens + 5, sequences=9))
    assert filled.upper[6:].tolist() == [IGNORE] * 3
    model = Half().eval()
    torch.testing.assert_close(model(plain), model(filled))
    room = Capacity(tokens=plain.num_tokens + 20, sequences=9)
    target = static_batch(_batch(4), room)
    copy_batches([target], [static_batch(plain, room)])
    assert torch.equal(target.upper[:6], plain.upper)


def test_a_task_without_fp8_products_says_so():
    with pytest.raises(ConfigError, match="PRECISION=fp8: Half has no products in fp8"):
        _step(alone(), sharded=True, precision="fp8")
