"""Weights into a model, and a model out as a folder that Hugging Face's classes load too."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from bert.checkpoint import copy_weights, read_state_dict
from bert.model.config import BertConfig
from bert.rundir import write_text
from finetune.models import Classification, FineTuned

_WORDS = "bert.embeddings.word_embeddings.weight"


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


def load(model: FineTuned, path: Path) -> tuple[list[str], list[str]]:
    """Copies weights of a pretrained or fine-tuned BERT; heads may be missing, and others be left over.

    Returns the names that the checkpoint lacks, and those that it has beyond this model. Raises ConfigError for a
    checkpoint that cannot be read, without the whole encoder, or of other shapes.
    """
    tensors = read_state_dict(path)
    if not any(name.startswith("bert.") for name in tensors):
        tensors = {f"bert.{name}": tensor for name, tensor in tensors.items()}  # an encoder that was saved by itself
    parameters = dict(model.named_parameters())
    lacking = [name for name in parameters if name not in tensors]
    needed = [name for name in lacking if name.startswith("bert.") and not name.startswith("bert.pooler.")]
    problems = [f"{name} is missing" for name in needed]
    copy_weights(parameters, tensors, model.config.vocab_size, problems, path)
    positions = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
    return lacking, sorted(name for name in tensors if name not in parameters and name not in positions)


def hugging_face_config(model: FineTuned, labels: tuple[str, ...] = ()) -> dict[str, Any]:
    """config.json of the model for Hugging Face's classes; of a Pre-LN model, which they have not, for ours alone."""
    config: BertConfig = model.config
    kind = "SequenceClassification" if isinstance(model, Classification) else "QuestionAnswering"
    values = dataclasses.asdict(config) | {"hidden_act": config.hugging_face_hidden_act}
    if not values.pop("layer_norm_large_model"):
        values |= {"architectures": [f"BertFor{kind}"], "model_type": "bert", "pad_token_id": 0}
    else:  # without a model_type their classes stop, where they would compute another model
        values |= {"layer_norm_large_model": True}
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
    folder.mkdir(parents=True, exist_ok=True)
    if model.config.layer_norm_large_model:
        print(
            f"finetune: {folder}: Hugging Face's BERT cannot hold this Pre-LN model (layer_norm_large_model): load it "
            "with python -m finetune predict",
            file=sys.stderr,
            flush=True,
        )
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in masters.items()}
    tensors[_WORDS] = tensors[_WORDS][: model.config.vocab_size].clone()
    partial = folder / ".model.safetensors"
    safetensors.torch.save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    if vocab_file.resolve() != (folder / "vocab.txt").resolve():
        shutil.copyfile(vocab_file, folder / "vocab.txt")
    labels = tuple(task.get("labels", ()))
    write_text(folder / "config.json", json.dumps(hugging_face_config(model, labels), indent=2) + "\n")
    tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": task["lower_case"]}
    write_text(folder / "tokenizer_config.json", json.dumps(tokenizer, indent=2) + "\n")
    write_text(folder / "task.json", json.dumps(dict(task), indent=2) + "\n")
