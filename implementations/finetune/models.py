"""BERT with a span or classification head: loading weights, and saving as a Hugging Face folder.

Parameter names are Hugging Face's.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert.checkpoint import huggingface
from bert.checkpoint.weights import Loaded, copy_weights, misfits, read_state_dict
from bert.data.batch import Batch
from bert.kernels import Kernels
from bert.model.bert import BertWithHeads, fp32_at_least
from bert.model.config import BertConfig
from common.env import ConfigError
from common.files import write_json
from finetune.batches import LabelledBatch, SpanBatch


class SpanLosses(NamedTuple):
    """Cross-entropy over the tokens of each sequence, averaged over start and end."""

    span: Tensor


class LabelLosses(NamedTuple):
    """Cross-entropy of the classes, of each label where there are several, or squared error of a
    regression.
    """

    label: Tensor


class FineTuned(BertWithHeads):
    """An encoder and a linear head. hugging_face: the model's name there; of_tokens: whether it
    scores every token, rather than every sequence.
    """

    hugging_face = ""
    of_tokens = False

    def stages(self) -> list[nn.Module]:
        # In the order of the forward pass, by which gradients are reduced and parameters gathered.
        poolers = [] if self.of_tokens else [self.bert.pooler]
        _, *heads = self.children()
        return [self.bert.embeddings, *self.bert.encoder.layer, *poolers, *heads]

    def scores(self, batch: Batch) -> Tensor:
        """Logits of the head in fp32 or higher: per token [T, classes] or sequence [S, classes]."""
        raise NotImplementedError


def _sequences(batch: Batch) -> Tensor:
    """The number of each token's sequence, [T]."""
    lengths = batch.cu_seqlens.diff().long()
    index = torch.arange(len(lengths), device=lengths.device)
    return index.repeat_interleave(lengths, output_size=len(batch.input_ids))


class SpanPrediction(FineTuned):
    """Scores every token as start and end of the answer (BertForQuestionAnswering). Has no
    pooler.
    """

    hugging_face = "QuestionAnswering"
    of_tokens = True

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__(config, kernels)
        del self.bert.pooler  # unused, so it would get no gradient
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    def scores(self, batch: Batch) -> Tensor:
        return fp32_at_least(self.qa_outputs(self.bert(batch)))

    def forward(self, batch: SpanBatch) -> SpanLosses:
        """-log softmax over the tokens of each sequence, at its start and end."""
        scores = self.scores(batch)
        # [T, 2]: for its start and its end score.
        index = _sequences(batch)[:, None].expand(-1, 2)
        # Without the maximum, exp would overflow. It cancels out, so no gradient flows through it.
        floor = scores.new_full((len(batch.starts), 2), torch.finfo(scores.dtype).min)
        largest = floor.scatter_reduce(0, index, scores.detach(), "amax")
        shares = (scores - largest.gather(0, index)).exp()
        log_sums = (
            largest + torch.zeros_like(largest).scatter_add(0, index, shares).log()
        )  # [S, 2]
        labels = torch.stack([batch.starts, batch.ends], dim=1)  # [S, 2]
        # Labels count from the start of the sequence.
        chosen = scores.gather(0, labels + batch.cu_seqlens[:-1, None])
        return SpanLosses((log_sums - chosen).mean())


class Classification(FineTuned):
    """Scores the classes of every sequence, or predicts a number, from [CLS]
    (BertForSequenceClassification).
    """

    hugging_face = "SequenceClassification"

    def __init__(self, config: BertConfig, kernels: Kernels, num_classes: int) -> None:
        super().__init__(config, kernels)
        if self.of_tokens:
            del self.bert.pooler  # unused, so it would get no gradient
        self.classifier = nn.Linear(config.hidden_size, num_classes)

    def scores(self, batch: Batch) -> Tensor:
        first = batch.cu_seqlens[:-1]
        # As in Hugging Face's BertForSequenceClassification and in Google's run_classifier.py.
        return self.classified(self.bert.pooler(self.bert(batch, first)))

    def classified(self, hidden: Tensor) -> Tensor:
        rate = self.config.hidden_dropout_prob
        return fp32_at_least(self.classifier(F.dropout(hidden, rate, self.training)))

    def forward(self, batch: LabelledBatch) -> LabelLosses:
        scores = self.scores(batch)
        if not batch.labels.is_floating_point():
            # The mean over those that are not -100.
            return LabelLosses(F.cross_entropy(scores, batch.labels))
        if batch.labels.ndim == 2:
            loss = F.binary_cross_entropy_with_logits(scores, batch.labels)
            return LabelLosses(loss)
        return LabelLosses(F.mse_loss(scores[:, 0], batch.labels))


class Tagging(Classification):
    """Scores the classes of every token (BertForTokenClassification). Has no pooler."""

    hugging_face = "TokenClassification"
    of_tokens = True

    def scores(self, batch: Batch) -> Tensor:
        return self.classified(self.bert(batch))


class Embedding(SpanPrediction):
    """The encoder alone, for inference. Of every sequence the mean of its tokens in the last layer,
    as sentence-transformers pools an encoder by default.
    """

    of_tokens = False

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__(config, kernels)
        del self.qa_outputs

    def scores(self, batch: Batch) -> Tensor:
        tokens = fp32_at_least(self.bert(batch))
        lengths = batch.cu_seqlens.diff()
        sums = tokens.new_zeros(len(lengths), tokens.shape[1])
        sums.index_add_(0, _sequences(batch), tokens)
        return sums / lengths[:, None]  # [S, D]


def initialize(model: FineTuned, seed: int) -> None:
    """Initializes all parameters, for those that no checkpoint has: weights N(0,
    initializer_range), biases 0.
    """
    # On the CPU and apart from the global generator: the same head on any device.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                drawn = torch.empty(parameter.shape).normal_(0, 1, generator=generator)
                parameter.copy_(drawn)
                parameter.mul_(model.config.initializer_range)
            elif name.endswith("bias"):
                parameter.zero_()


def load(model: FineTuned, path: Path) -> Loaded:
    """Copies weights of a pretrained or fine-tuned BERT; heads may be missing or left over.

    Raises ConfigError if the checkpoint is unreadable, lacks parts of the encoder, or has other
    shapes or non-finite values.
    """
    tensors = read_state_dict(path)
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    # A head for other classes is none for these.
    others = [
        name
        for name, shape in shapes.items()
        if not name.startswith("bert.")
        and name in tensors
        and tensors[name].shape != shape
    ]
    if others:
        tensors = {name: t for name, t in tensors.items() if name not in others}
    lacking = [name for name in shapes if name not in tensors]
    unused = sorted(name for name in tensors if name not in shapes)
    # The encoder must be there; a head or pooler may be new, as pretrained weights have another.
    heads = [name for name in lacking if not re.match(r"bert\.(?!pooler\.)", name)]
    if problems := misfits(shapes, tensors, model.config.vocab_size, [*heads, *unused]):
        message = f"does not fit BERT_CONFIG: {'; '.join(sorted(problems))}"
        raise ConfigError(f"INIT_CHECKPOINT={path} {message}")
    copy_weights(parameters, tensors, path)
    return Loaded(lacking, unused)


def hugging_face_config(
    model: FineTuned, labels: tuple[str, ...] = ()
) -> dict[str, Any]:
    """config.json of the model, for Hugging Face's classes; they do not support Pre-LN, so then
    only for ours.
    """
    values = huggingface.config_values(model.config, f"BertFor{model.hugging_face}")
    if isinstance(model, Classification) and model.classifier.out_features == 1:
        # Hugging Face's regression: one output, and this problem_type.
        labels = ("LABEL_0",)
        values["problem_type"] = "regression"
    if labels:
        values["id2label"] = {str(number): name for number, name in enumerate(labels)}
        values["label2id"] = {name: number for number, name in enumerate(labels)}
    return values


def save(
    folder: Path,
    model: FineTuned,
    masters: Mapping[str, Tensor],
    vocab_file: Path,
    task: Mapping[str, Any],
) -> None:
    """Writes a folder for `python -m finetune predict` and Hugging Face's from_pretrained.

    Hugging Face cannot load a Pre-LN model, and refuses it. masters: parameters in fp32 by name;
    task: the contents of task.json, the training settings that prediction needs.
    """
    values = hugging_face_config(model, tuple(task.get("labels", ())))
    if task.get("several_labels"):
        values["problem_type"] = "multi_label_classification"
    huggingface.write(
        folder, masters, model.config, values, vocab_file, task["lower_case"]
    )
    write_json(folder / "task.json", dict(task))
