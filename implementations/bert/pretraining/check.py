"""``python -m bert --check``: is everything there, does it fit, and what would run? Before any GPU is taken."""

from __future__ import annotations

import dataclasses
import hashlib

from bert.checkpoint.weights import Checksum, check_vocabulary, chunks_of
from bert.core.dist import World, pick_device
from bert.data.loader import make_batching, open_masks, open_source
from bert.data.records import DataError
from bert.data.sampler import Sampler
from bert.data.shards import Shards
from bert.kernels import select
from bert.model.bert import BertForPreTraining
from bert.model.init import uninitialized
from bert.pretraining import deepspeed_memory, hand_over, memory
from bert.pretraining.config import Config
from bert.training import schedule
from bert.training.evaluate import Evaluator


def report(config: Config) -> str:
    """The settings and what follows from them. Raises ConfigError or DataError for what would stop the run."""
    rows = [("system", f"{config.mlperf.num_nodes} x {config.mlperf.system}, {config.dist.world_size} ranks")]
    model, weights = _model(config)
    num_parameters, form = sum(p.numel() for p in model.parameters()), config.model.gelu_form
    rows.append(("model", f"{num_parameters:,} parameters, GELU in its {form} form, {config.bert_config_path}"))
    rows.append(("kernels", config.kernels.describe(pick_device(config.dist))))
    alone = World(dataclasses.replace(config.dist, world_size=1, rank=0, local_rank=0))
    rows.append(("attention", config.kernels.choose(config.numerics.dtype, config.uses_graph, alone)[1]))
    data = config.data
    batch = f"{data.batch_size} rows x {data.gradient_steps} accumulated x {config.dist.world_size} ranks"
    rows.append(
        ("global batch", f"{config.global_batch_size} sequences = {batch} x packing factor {data.packing_factor}")
    )
    rows.append(("steps", f"at most {config.max_steps} ({config.max_steps * config.global_batch_size:,} samples)"))
    rows.append(("learning rate", schedule.describe(config.schedule)))
    evaluate = config.evaluate
    when = f"every {evaluate.every_samples:,} samples from {evaluate.start_samples or evaluate.every_samples:,}"
    target = f"target {evaluate.target}" if evaluate.has_target else "no target"
    rows.append(("evaluation", f"{when if evaluate.every_samples else 'none'}, {target}"))
    if config.mlperf.division == "closed":
        rows.append(("convergence", f"the reference's: python -m review rcp {config.global_batch_size}"))
    rows.append(("memory", (deepspeed_memory if config.zero.is_deepspeed else memory).describe(config)))
    rows.append(("data", _data(config)))
    rows.append(("weights", weights))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _model(config: Config) -> tuple[BertForPreTraining, str]:
    """The model, on the meta device, and what weights it would begin with, of which names and shapes are checked."""
    kernels = select(config.kernels, pick_device(config.dist))
    with uninitialized():
        model = BertForPreTraining(config.model, kernels)
    said = "random"
    if config.checkpoint.init_checkpoint is not None:
        _, loaded = chunks_of(model, config.checkpoint.init_checkpoint, 0, config.may_have_new_heads, Checksum())
        said = f"{config.checkpoint.init_checkpoint}{f': {loaded}' if any(loaded) else ''}"
    if config.checkpoint.init_optimizer:
        hand_over.read(config, {name: parameter.shape for name, parameter in model.named_parameters()})
    return model, said


def _data(config: Config) -> str:
    if config.data.synthetic:
        return "synthetic"
    data = config.data
    folder, variable = data.source
    shards = open_source(config.data, config.model.vocab_size)
    assert isinstance(shards, Shards)
    first = shards[0]
    if config.data.packed and first.row_offsets is None:
        raise DataError(f"{variable}={folder}: these records are not packed; set PACKED=0, or give the packed folder")
    check_vocabulary(config.checkpoint.init_checkpoint, shards.vocab_md5)
    if int(first.input_ids.max()) >= config.model.vocab_size:
        raise DataError(f"{variable}={folder}: token ids past vocab_size {config.model.vocab_size} of bert_config.json")
    sampler = Sampler(shards.row_counts(), config.data.rows_per_step, 0, 0, config.dist.world_size)
    make_batching(shards, sampler, config.data)
    vocab = config.phase1 / "vocab.txt" if config.phase1 else None
    if vocab is not None and vocab.is_file() and hashlib.md5(vocab.read_bytes()).hexdigest() != shards.vocab_md5:
        raise DataError(f"{variable}={folder}: made with another vocabulary than {vocab}; prepare the data again")
    found = f"{len(shards)} files in {folder}"
    if masks := open_masks(data, shards, config.phase1, config.model.vocab_size, seed=0):
        found += (
            f"; MASKING=dynamic: other masks every epoch, token {masks.tokens.mask} of {masks.tokens.size:,} is [MASK]"
        )
    if not config.evaluates:
        return found
    world = World(dataclasses.replace(config.dist, world_size=1, rank=0, local_rank=0, device="cpu"))
    Evaluator(config.evaluate, config.data.max_seq_length, config.model.vocab_size, shards.vocab_md5, world)
    return f"{found}; {config.evaluate.num_examples:,} evaluation sequences"
