"""What most tests of the trainer are made of: one rank, plain operations, a model and its step."""

import torch

from bert import kernels, optim
from bert.core.dist import DistConfig, World
from bert.kernels.precision import Precision, PrecisionConfig
from bert.model.bert import BertForPreTraining
from bert.model.init import initialize
from bert.training.step import build_step

CPU = torch.device("cpu")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PLAIN = kernels.bind_kernels(kernels.KernelsConfig(fused="none"), CPU)


def alone():
    return World(DistConfig(device="cpu"))


def model_of(config, seed=0, dtype=torch.float32):
    """With its first weights; of no seed as its modules draw them."""
    model = BertForPreTraining(config, PLAIN)
    if seed is not None:
        initialize(model, seed)
    return model.to(dtype)


def step_of(
    model,
    precision="fp32",
    world=None,
    accumulate=False,
    first_weights=None,
    **settings,
):
    """The model's step. precision: a name, or what it is resolved to; settings: the optimizer's."""
    if isinstance(precision, str):
        precision = PrecisionConfig(precision=precision).resolve(CPU)
    elif isinstance(precision, torch.dtype):
        precision = Precision(dtype=precision)
    return build_step(
        model, precision, optim.OptimizerConfig(**settings), world or alone(),
        accumulate=accumulate, fused_update=False, first_weights=first_weights,
    )  # fmt: skip


def close(found, expected, atol=0.0, rtol=0.0):
    """Asserts that tensors are close, by name."""
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=atol, rtol=rtol, msg=name)
