"""Weights into a model, and a model out as a folder that Hugging Face's classes load too."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bert.checkpoint import huggingface
from bert.checkpoint.weights import Loaded, copy_weights, read_state_dict
from bert.core.files import write_text
from bert.model.config import BertConfig
from finetune.models import Classification, FineTuned


def initialise(model: FineTuned, seed: int) -> None:
    """Draws what no checkpoint brings, the head and a pooler: weights from N(0, initializer_range), biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.copy_(torch.empty(module.weight.shape).normal_(0, 1, generator=generator))
                module.weight.mul_(model.config.initializer_range)
            if isinstance(module, nn.Linear):
                module.bias.zero_()


def load(model: FineTuned, path: Path) -> Loaded:
    """Copies weights of a pretrained or fine-tuned BERT; heads may be missing, and others be left over.

    Raises ConfigError for a checkpoint that cannot be read, without the whole encoder, or of other shapes.
    """
    tensors = read_state_dict(path)
    parameters = dict(model.named_parameters())
    lacking = [name for name in parameters if name not in tensors]
    needed = [name for name in lacking if name.startswith("bert.") and not name.startswith("bert.pooler.")]
    problems = [f"{name} is missing" for name in needed]
    copy_weights(parameters, tensors, model.config.vocab_size, problems, path)
    positions = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
    return Loaded(lacking, sorted(name for name in tensors if name not in parameters and name not in positions))


def hugging_face_config(model: FineTuned, labels: tuple[str, ...] = ()) -> dict[str, Any]:
    """config.json of the model for Hugging Face's classes; of a Pre-LN model, which they have not, for ours alone."""
    config: BertConfig = model.config
    kind = "SequenceClassification" if isinstance(model, Classification) else "QuestionAnswering"
    values = huggingface.config_values(config, f"BertFor{kind}")
    if labels:
        values["id2label"] = {str(number): name for number, name in enumerate(labels)}
        values["label2id"] = {name: number for number, name in enumerate(labels)}
    return values


def save(
    folder: Path, model: FineTuned, masters: Mapping[str, Tensor], vocab_file: Path, task: Mapping[str, Any]
) -> None:
    """Writes a folder that `python -m finetune predict` and Hugging Face's from_pretrained load.

    Of a Pre-LN model only the former, which a line on stderr says.

    Args: masters: parameters in fp32 by name; task: what prediction must know of the training, goes into task.json.
    """
    if model.config.layer_norm_large_model:
        print(
            f"finetune: {folder}: {huggingface.PRE_LN}: load it with python -m finetune predict",
            file=sys.stderr,
            flush=True,
        )
    values = hugging_face_config(model, tuple(task.get("labels", ())))
    huggingface.write(folder, masters, model.config, values, vocab_file, task["lower_case"])
    write_text(folder / "task.json", json.dumps(dict(task), indent=2) + "\n")
