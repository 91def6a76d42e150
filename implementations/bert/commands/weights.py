"""Finding trained weights: in a run's folder, among its checkpoints, or in the Hub's layout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bert.checkpoint import huggingface
from bert.checkpoint.save import is_ours, saved_checkpoints, step_path
from bert.checkpoint.sharded import read_file
from bert.checkpoint.weights import read_state_dict, vocabulary_of
from bert.core.dist import World
from bert.kernels import bind_kernels
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.training.config import Hardware
from common.env import ConfigError
from common.files import damage, object_of


@dataclass(frozen=True, kw_only=True)
class Source(Hardware):
    """Hardware settings of a command: the trainer's variables (DEVICE, PRECISION, ...)."""

    def model(self, shape: BertConfig, world: World) -> BertForPreTraining:
        """A model for inference on this device, without weights."""
        self.dist.check()
        self.precision.check(self.device)
        # No graph: sizes differ.
        choice, _ = self.kernels.resolve_attention(
            shape, self.numerics.dtype, False, world
        )
        return (
            BertForPreTraining(shape, bind_kernels(choice, self.device))
            .to(self.device, self.numerics.dtype)
            .eval()
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A weights file, or the index of a sharded checkpoint, and what is known of it.

    steps, samples: trained, None if unknown; vocab_md5: "" if unknown.
    """

    path: Path
    shape: BertConfig
    steps: int | None = None
    samples: int | None = None
    vocab_md5: str = ""


def find(path: Path) -> list[Path]:
    """The weights files of a path, oldest first.

    A run's folder stands for its checkpoints, that of run_pretraining.sh for those of its latest
    phase, a folder in the Hub's layout for its weights. Raises ConfigError if there are none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"{path}: no such file or folder: name a checkpoint, a folder of them, or a run"
        )
    for folder in (
        path,
        path / "phase2" / "checkpoints",
        path / "checkpoints",
        path / "phase1" / "checkpoints",
    ):
        if checkpoints := saved_checkpoints(folder):
            return checkpoints
    # CHECKPOINT_DIR may lie outside of the run's folder, whose config.json names it.
    elsewhere = _settings(path).get("checkpoint", {}).get("directory")
    if elsewhere and (checkpoints := saved_checkpoints(Path(elsewhere))):
        return checkpoints
    if weights := huggingface.weights_in(path):
        return [weights]
    raise ConfigError(
        f"{path}: no step_* and no model.safetensors in it: name a checkpoint, or a run's folder"
    )


def describe(path: Path, bert_config: Path | None = None) -> Trained:
    """What is known of a weights file, from itself, ``bert_config`` or the model config beside it.

    Raises ConfigError for a file that cannot be read, and if no model config is found.
    """
    saved: Mapping[str, Any] = {}
    if is_ours(path):
        try:
            # Mapped: of gigabytes only the small entries are read.
            saved = read_file(path, mmap=True)
        except Exception as error:  # depends on the kind of damage
            raise ConfigError(
                f"{step_path(path)}: not a readable checkpoint ({damage(error)})"
            ) from None
    beside = bert_config or huggingface.config_beside(path)
    # Our own checkpoints hold the model's shape; a config that was given still wins.
    if bert_config is None and "bert_config" in saved:
        try:
            shape = BertConfig(**saved["bert_config"])
        except (ConfigError, TypeError) as error:  # a key of another version
            raise ConfigError(f"{step_path(path)}: bert_config: {error}") from None
    elif beside is not None:
        # By the weights: no config in either layout says whether there is a next-sentence head.
        paired = "cls.seq_relationship.weight" in read_state_dict(path)
        shape = replace(BertConfig.from_json(beside), next_sentence=paired)
    else:
        raise ConfigError(
            f"{path}: no model config found: give its bert_config.json by --bert-config"
        )
    steps, samples = saved.get("step"), saved.get("samples")
    return Trained(
        path=path,
        shape=shape,
        steps=steps,
        samples=samples,
        vocab_md5=vocabulary_of(path),
    )


def vocabulary(trained: Trained, given: Path | None = None) -> Path:
    """The weights' vocab.txt: ``given``, beside them, or by the run's settings.

    Raises ConfigError if it is not found, or is not the one they were trained with.
    """
    path = step_path(trained.path)
    # Beside the weights, and in the run's folder above its folder of checkpoints; links are
    # followed, as a run may be elsewhere.
    near = [path.parent, *list(path.resolve().parents)[1:3]]
    candidates = [given] if given else [folder / "vocab.txt" for folder in near]
    if given is None:
        for settings in map(_settings, near):
            phase1, config = settings.get("phase1"), settings.get("bert_config")
            candidates += [Path(phase1) / "vocab.txt"] if phase1 else []
            candidates += [Path(config).parent / "vocab.txt"] if config else []
    for candidate in candidates:
        # A path that was given must hold; the others are only tried.
        if candidate.is_file() or given:
            huggingface.check_vocabulary(candidate, trained.shape, trained.vocab_md5)
            return candidate
    raise ConfigError(f"{trained.path}: its vocab.txt is not found: give it by --vocab")


def _settings(folder: Path) -> dict[str, Any]:
    """config.json of a run's folder; empty for other folders."""
    settings = object_of(folder / "config.json")
    # Hugging Face's models have a config.json too, without this entry.
    return settings if isinstance(settings.get("checkpoint"), dict) else {}
