"""``python -m bert export``."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch

from bert.checkpoint import huggingface
from bert.checkpoint.weights import load_weights
from bert.commands import weights as trained
from bert.kernels import KernelsConfig, bind_kernels
from bert.model.bert import BertForPreTraining
from common.env import ConfigError
from common.process import say


def export(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> int:
    """Exports trained weights in Hugging Face's format.

    PATH is a run's folder, a checkpoint or a folder of them (the newest). FOLDER gets config.json,
    model.safetensors (fp32), vocab.txt and tokenizer_config.json: AutoModel,
    AutoModelForPreTraining (with NSP=0 AutoModelForMaskedLM) and the fill-mask pipeline load it, as
    do INIT_CHECKPOINT=FOLDER and fine-tuning.
    """
    parser.add_argument(
        "path", type=Path, help="a run's folder, a checkpoint, or a folder of them"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder to write",
    )
    parser.add_argument(
        "--vocab",
        type=Path,
        help="the model's vocab.txt (default: found by the run's settings)",
    )
    parser.add_argument(
        "--bert-config",
        type=Path,
        help="the model's bert_config.json, if not found otherwise",
    )
    options = parser.parse_args(arguments)
    try:
        _check_target(options.output)
        # The newest of a folder.
        source = trained.describe(trained.find(options.path)[-1], options.bert_config)
        _write(options.output, source, trained.vocabulary(source, options.vocab))
    except OSError as error:  # a full disk
        raise ConfigError(str(error)) from None
    _report(options.output, source)
    return 0


def _check_target(folder: Path) -> None:
    """Raises ConfigError for a folder with other things in it, which is not ours to write to; an
    earlier export is replaced.
    """
    others = not folder.is_dir() or any(
        path.name[0] != "." for path in folder.iterdir()
    )
    if folder.exists() and others and not huggingface.weights_in(folder):
        raise ConfigError(
            f"{folder}: exists and holds no model: give a new folder by -o"
        )


def _write(folder: Path, source: trained.Trained, vocab_file: Path) -> None:
    # Only names and shapes matter here: the plainest kernels, which run everywhere.
    kernels = KernelsConfig(fused="none", attention="sdpa_loop")
    model = BertForPreTraining(source.shape, bind_kernels(kernels, torch.device("cpu")))
    load_weights(model, source.path)
    kind = "PreTraining" if source.shape.next_sentence else "MaskedLM"
    huggingface.write(
        folder,
        dict(model.named_parameters()),
        source.shape,
        huggingface.config_values(source.shape, f"BertFor{kind}"),
        vocab_file,
        huggingface.lower_case(vocab_file),
    )


def _report(folder: Path, source: trained.Trained) -> None:
    """Says on stderr what was exported, and what its readers have to know."""
    if source.shape.layer_norm_large_model:
        cure = "load it as INIT_CHECKPOINT"
        say(f"bert export: {folder}: {huggingface.PRE_LN}: {cure}")
    after = f", after {source.steps:,} steps" if source.steps is not None else ""
    say(f"{folder}: {source.path}{after}; GELU in its {source.shape.gelu_form} form")
    if not source.shape.next_sentence:
        cure = "AutoModel.from_pretrained(..., add_pooling_layer=False)"
        say(f"bert export: {folder}: NSP=0 trained no pooler: {cure}")
