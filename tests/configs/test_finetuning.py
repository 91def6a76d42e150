"""The fine-tuning configs are the published recipes, and export only names that are read."""

import json
from pathlib import Path

import pytest

from bert.core import variables
from finetune import config

from .test_configs import BERT_LARGE, CONFIGS, READ_ELSEWHERE, exports

# Name: task, sequences of a step, learning rate, warm-up, epochs, tokens of a sequence, seeds.
RECIPES = {
    "finetune_squad_DGX1V_1x8x4": ("squad", 32, 3e-5, 0.1, 2, 384, 1),
    "finetune_squad_DGXA100_1x8x32": ("squad", 256, 4.6e-5, 0.2, 2, 384, 1),
    "finetune_MRPC_DGXA100_1x8x16": ("MRPC", 128, 1.8e-5, 0.3, 3, 128, 10),
    "finetune_SST2_DGXA100_1x8x128": ("SST-2", 1024, 1e-5, 0.1, 3, 128, 1),
}


def test_every_config_of_fine_tuning_is_a_recipe():
    assert {path.stem for path in CONFIGS.glob("finetune_*.sh")} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_is_its_recipe_and_starts(name, tmp_path, repository):
    exported = exports(CONFIGS / f"{name}.sh", DATADIR=str(tmp_path))
    known = {entry.name for entries in variables.groups().values() for entry in entries}
    assert not set(exported) - known - READ_ELSEWHERE
    assert exported["RANK_MODULE"] == "finetune"
    assert exported["DGXSYSTEM"] == name
    Path(exported["DATA"]).mkdir()
    (tmp_path / "x.pt").touch()
    (tmp_path / "vocab.txt").write_text("\n".join(map(str, range(30522))))
    (tmp_path / "bert_config.json").write_text(json.dumps(BERT_LARGE))
    world = int(exported["DGXNNODES"]) * int(exported["DGXNGPU"])
    # A machine without GPUs refuses fp16; the rest of the recipe is checked.
    environ = exported | {"INIT_CHECKPOINT": str(tmp_path / "x.pt")}
    environ |= {"WORLD_SIZE": str(world), "DEVICE": "cpu"}
    read = config.read({**environ, "PRECISION": ""})
    rates = config.learning_rates(environ, 100)
    seeds = exported.get("SEEDS", "1").count(",") + 1
    found = read.task, read.samples_per_step, rates.lr, rates.warmup_share
    assert (*found, read.epochs, read.length, seeds) == RECIPES[name]
    assert read.optim.optimizer == "bertadam"
    assert f"`{name}`" in (repository / "docs" / "finetuning.md").read_text()
