"""``python -m bert --check``: validates settings, data and weights, and describes the run. Before
any GPU is taken.
"""

import dataclasses
import json
from typing import Any

from bert.checkpoint.weights import Checksum, chunks_of
from bert.core.dist import World
from bert.data.format import open_records
from bert.data.shards import Shards
from bert.model.bert import BertForPreTraining
from bert.pretraining import closed_division, inputs, memory, resume, trial
from bert.pretraining.build import pad_and_pin
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.identity import check_identity, pick_seed
from bert.training import schedule
from common.files import text_of

# Gururangan et al. 2020, "Don't Stop Pretraining", tables 1, 3 and 5.
WORTH = "continuing has helped with 2 to 8 billion tokens of a domain, or with the task's own texts"
MOST_PASSES = 40  # over a text: as in BERT's own pretraining (Devlin et al. 2019, A.2)


def report(config: PretrainingConfig) -> str:
    """The settings and their consequences. Raises ConfigError or DataError for what would stop the
    run.
    """
    is_finished = trial.ended(config) is not None
    is_closed = config.mlperf.is_closed
    # A check is one process, without the ranks whose run it describes.
    alone = World(
        dataclasses.replace(config.dist, emulate=0, world_size=1, rank=0, local_rank=0)
    )
    kernels, attention = config.kernels.resolve_attention(
        config.model, config.numerics.dtype, config.uses_graph, alone
    )
    # As the run does, before it compares itself with its checkpoint.
    config = dataclasses.replace(config, kernels=kernels)
    # A trial that is finished continues from nothing.
    saved = None if is_finished else resume.newest(config, alone)
    model = memory.meta_model(config.model)
    weights = _weights(config, model, saved)
    num_parameters = sum(p.numel() for p in model.parameters())
    form = config.model.gelu_form
    heads = "both heads" if config.nsp else "masked-LM alone"
    data, evaluate, batch = config.data, config.evaluate, config.global_batch_size
    ranks = f"{config.dist.world_size} ranks"
    rows = f"{data.batch_size} rows x {data.gradient_steps} accumulated x {ranks}"
    when, every = "none", evaluate.every_samples
    if every:
        when = f"every {every:,} samples from {evaluate.start_samples or every:,}"
    target = f"target {evaluate.target}" if evaluate.has_target else "no target"
    lines = {
        "system": f"{config.mlperf.num_nodes} x {config.mlperf.system}, {ranks}",
        "model": f"{num_parameters:,} parameters, {heads}, GELU in its {form} form, {config.bert_config_path}",
        "kernels": config.kernels.describe(alone.device),
        "attention": attention,
        "global batch": f"{batch} sequences = {rows} x packing factor {data.packing_factor}",
        "steps": f"at most {config.max_steps} ({config.max_steps * batch:,} samples)",
        "learning rate": schedule.describe(config.schedule),
        "evaluation": f"{when}, {target}",
        "memory": memory.describe(config),
        "data": "synthetic" if data.synthetic else _data(config, saved),
        "weights": weights,
    }
    if not is_closed:
        lines["time"] = _hours(config, saved)
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _weights(
    config: PretrainingConfig, model: BertForPreTraining, saved: dict[str, Any] | None
) -> str:
    """Describes the weights that the run begins with. Raises ConfigError if it could not."""
    path, directory = config.checkpoint.init_checkpoint, config.checkpoint.directory
    seed, first = pick_seed(config.seed, saved), Checksum()
    text, proved = "random", ""
    # In the order of the run, so that of several problems both name the same.
    if path is not None and config.mlperf.is_closed:
        facts = closed_division.starting_weights(path)
        proved = "not proved" if facts["unproved"] else "proved"
        proved = f": {facts['weights']}, {proved} to be model.ckpt-28252"
    if path is not None:
        chunks, loaded = chunks_of(model, path, seed, config.may_have_new_heads, first)
        for _ in chunks:
            pass  # the checksum becomes that of all
        text = (f"{path}: {loaded}" if any(loaded) else str(path)) + proved
    if path is not None and saved is None and config.checkpoint.init_optimizer:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        resume.warm_start(path, config.optim.optimizer, shapes)
    if saved is not None:
        changed = check_identity(config, seed, saved)
        resume.check_first_weights(config, saved, first.value)
        text = f"step {saved['step']:,} of {directory}"
        text += f"; {changed}" if changed else ""
    # Reads all weights: a NaN in one of them would only show after the start, on all GPUs.
    inputs.check_finite_weights(config, saved, model)
    return text


def _hours(config: PretrainingConfig, saved: dict[str, Any] | None) -> str:
    """Hours of the remaining steps at the rate that the run in RUN_DIR had last."""
    text, folder = "", config.run.run_dir
    if folder is not None:
        text = text_of(config.run.file("metrics_{}.jsonl"))
    lines = map(json.loads, text.splitlines())
    rates = [line["sequences_per_second"] for line in lines if line["kind"] == "train"]
    if not rates:
        return "unknown: run a few steps to measure it (STEPS_THIS_RUN)"
    steps = config.max_steps - (int(saved["step"]) if saved is not None else 0)
    hours = steps * config.global_batch_size / rates[-1] / 3600
    return f"{hours:.1f} hours for {steps:,} steps at {rates[-1]:,.0f} sequences/s, as in {folder}"


def _data(config: PretrainingConfig, saved: dict[str, Any] | None) -> str:
    """Describes the data. Raises DataError if no batches can be made of it."""
    data, is_closed = config.data, config.mlperf.is_closed
    # Records are only read here, and no GPU is taken before the run.
    world = World(
        dataclasses.replace(config.dist, emulate=0, world_size=1, rank=0, device="cpu")
    )
    shards = inputs.checked_source(config, world, saved)
    assert isinstance(shards, Shards)
    unproved = is_closed and closed_division.data_sets(config, shards)["unproved"]
    evaluator = inputs.evaluator_of(config, world, shards)
    pads, seed = pad_and_pin(config, world), pick_seed(config.seed, saved)
    batches = inputs.training_data(config, shards, seed, saved, pads)
    try:
        batches.next_step()  # that the run begins with
    finally:
        batches.close()
    if is_closed:
        closed_division.prove(config, shards, world)

    first, num_rows = shards[0], int(shards.row_counts().sum())
    # 0: other makers' files do not say it, and their text is known with its copies alone.
    copies = open_records(shards.paths[0])[1].dupe_factor
    rows = config.max_steps * data.rows_per_step * config.dist.world_size
    row_tokens = len(first.input_ids) / max(1, first.num_rows)
    epochs = rows / num_rows
    text = f"a text of about {num_rows * row_tokens / max(1, copies):,.0f} tokens"
    if not copies:
        text += " with its copies, whose number is unknown"
    trained = f"about {rows * row_tokens:,.0f} tokens trained on, {epochs:.3g} epochs"
    summary = f"{len(shards)} files in {data.source[0]}; {text}; {trained}"
    if copies > 1:
        summary += f" of {copies} copies of the text"
    # Each copy of the text in the records is another pass over it.
    if not is_closed and epochs * max(1, copies) > MOST_PASSES:
        summary += f": more than BERT's own {MOST_PASSES} passes: lower MAX_STEPS, or give more text"
    start = config.checkpoint
    if not is_closed and start.init_checkpoint and not start.init_optimizer:
        summary += f"; {WORTH}"
    if not shards.vocab_md5:
        summary += "; of an unknown vocabulary, whose ids fit vocab_size"
    if unproved:
        summary += "; not proved to be the benchmark's"
    if masks := batches.masks:
        mask, words = masks.tokens.mask, masks.tokens.size
        summary += f"; MASKING=dynamic: other masks every epoch, token {mask} of {words:,} is [MASK]"
    if evaluator:
        summary += f"; {evaluator.num_sequences:,} evaluation sequences"
    return summary
