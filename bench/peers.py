"""Hugging Face's BertForPreTraining as a peer: padded and packed, eager and compiled, on the same sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import transformers
from torch import Tensor

from bert.data.batch import PretrainingBatch
from bert.kernels.cross_entropy import IGNORE
from bert.model.config import BertConfig

Inputs = dict[str, Tensor]


def rows_of(batch: PretrainingBatch, length: int, packed: bool) -> list[list[tuple[int, int]]]:
    """Sequences (begin, end) of each row: alone, or as many consecutive ones as fit."""
    rows: list[list[tuple[int, int]]] = []
    used = length
    for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()[: batch.num_sequences + 1]):
        if not packed or used + end - begin > length:
            rows.append([])
            used = 0
        rows[-1].append((begin, end))
        used += end - begin
    return rows


def inputs_of(batch: PretrainingBatch, length: int, packed: bool, device: torch.device) -> Inputs:
    """The batch as BertForPreTraining takes it, rows filled up to ``length``.

    A packed row has a block-diagonal mask and positions that restart. The model pools the first token of a row only, so
    its next-sentence head sees one sequence a row: a little less work than ours.
    """
    rows = rows_of(batch, length, packed)
    shape = (len(rows), length)
    labels = torch.full((batch.num_tokens,), IGNORE)
    labels[batch.masked_positions.long()[: batch.num_masked]] = batch.masked_labels[: batch.num_masked]
    made = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "token_type_ids", "position_ids")}
    made["labels"] = torch.full(shape, IGNORE)
    document = torch.full(shape, -1)
    first = []
    starts = {begin: number for number, begin in enumerate(batch.cu_seqlens.tolist())}
    for row, sequences in enumerate(rows):
        first.append(starts[sequences[0][0]])
        at = 0
        for number, (begin, end) in enumerate(sequences):
            place = slice(at, at + end - begin)
            made["input_ids"][row, place] = batch.input_ids[begin:end].long()
            made["token_type_ids"][row, place] = batch.segment_ids[begin:end].long()
            made["position_ids"][row, place] = torch.arange(end - begin)
            made["labels"][row, place] = labels[begin:end]
            document[row, place] = number
            at += end - begin
    made["next_sentence_label"] = batch.next_sentence_labels[first]
    if packed:
        same = (document[:, None, :, None] == document[:, None, None, :]) & (document[:, None, None, :] >= 0)
        made["attention_mask"] = same | torch.eye(length, dtype=torch.bool)  # padding sees itself: no row without keys
    else:
        made["attention_mask"] = (document >= 0).long()
    return {name: tensor.to(device) for name, tensor in made.items()}


def build(
    config: BertConfig, batches: Sequence[PretrainingBatch], device: torch.device, *, packed: bool, compiled: bool
) -> Callable[[int], object]:
    """step(n): a step on the n-th batch, with AdamW and clipping; on a GPU in bf16 with the fused AdamW."""
    shape = {name: getattr(config, name) for name in vars(config) if name != "hidden_act"}
    theirs = transformers.BertConfig(**shape, hidden_act=config.hugging_face_hidden_act, attn_implementation="sdpa")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = transformers.BertForPreTraining(theirs).to(device, dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    length = config.max_position_embeddings
    inputs = [inputs_of(batch, length, packed, device) for batch in batches]
    forward = torch.compile(model) if compiled else model

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(**inputs[number % len(inputs)]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step
