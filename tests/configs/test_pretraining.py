"""The recipes of pretraining from scratch: DeepLearningExamples' global batches on any number of nodes."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest

from bert.data import loader
from bert.model.config import BertConfig
from bert.training import schedule
from common.env import from_env, variables

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = [
    CONFIGS / f"pretrain_{model}_{gpu}.sh"
    for model in ("base", "large")
    for gpu in ["A100", "H100", "H200", "B200"]
]
NODES, BATCH = (1, 32), {"1": 65_536, "2": 32_768}


@pytest.fixture(scope="module")
def exported():
    """Exports by recipe, phase, PACKED and number of nodes: from sourcing the config in an empty environment."""
    cases = list(
        itertools.product([path.name for path in RECIPES], "12", "01", map(str, NODES))
    )
    script = (
        'set -eu; while read -r name PHASE PACKED DGXNNODES; do (export PHASE PACKED DGXNNODES; source "./$name"; '
        + ("env -0; printf '\\1') ; done")
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=CONFIGS, env={"PATH": "/usr/bin:/bin", "DATADIR": "/data"}, check=True,
        input="".join(" ".join(case) + "\n" for case in cases), capture_output=True, text=True,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    found = done.stdout.split("\1")[:-1]
    return {
        c: dict(x.split("=", 1) for x in text.split("\0") if x)
        for c, text in zip(cases, found, strict=True)
    }


def test_every_recipe_has_the_published_batches_and_schedules(exported):
    assert len(exported) == 8 * 2 * 2 * len(NODES)
    for (_, phase, packed, nodes), values in exported.items():
        data = from_env(loader.LoaderConfig, values)
        rates = from_env(schedule.ScheduleConfig, values)
        gpus = int(values["DGXNNODES"]) * int(values["DGXNGPU"])
        assert gpus == 8 * int(nodes)
        sequences = data.rows_per_step * data.packing_factor * gpus
        assert sequences == BATCH[phase], "of a step"
        assert data.packing_factor == (2 if (phase, packed) == ("2", "1") else 1)
        assert data.max_seq_length == {"1": 128, "2": 512}[phase]
        place = "packed_data" if packed == "1" else "hdf5/training"
        assert data.source[0] == Path(f"/data/{data.max_seq_length}", place)
        published = {"1": ("dle", 6e-3, 7038), "2": ("dle", 4e-3, 1563)}[phase]
        assert (rates.schedule, rates.lr, rates.max_steps) == published


def test_a_micro_batch_fits_the_gpus_memory_and_share(exported):
    tokens = {"A100": 32_768, "H100": 32_768, "H200": 65_536, "B200": 65_536}
    for (name, phase, _, nodes), values in exported.items():
        model, gpu = re.fullmatch(r"pretrain_(\w+)_(\w+)\.sh", name).groups()
        room = tokens[gpu] * (2 if model == "base" else 1) // int(phase)
        taken = int(values["BATCHSIZE"]) * int(values["MAX_SEQ_LENGTH"])
        assert taken <= room
        if nodes == "1":
            assert taken == room
        shape = Path(values.get("BERT_CONFIG", "bert_large.json"))
        assert shape.name == f"bert_{model}.json"
    base = BertConfig.from_json(CONFIGS / "models" / "bert_base.json")
    assert base.hidden_size == 768


def test_every_exported_name_is_read(exported, repository):
    from bert.pretraining.config import PretrainingConfig

    known = {variable.name for _, variable, _ in variables(PretrainingConfig)}
    listed = (repository / "launch" / "variables.txt").read_text()
    known |= set(re.findall(r"^([A-Z][A-Z0-9_]+)", listed, flags=re.MULTILINE))
    known |= {
        "PATH", "PWD", "OLDPWD", "SHLVL", "_", "PHASE", "CONFIG_EXPORTS", "WALLTIME", "SBATCH_TIMELIMIT", "DATADIR",
    }  # fmt: skip
    assert not {name for values in exported.values() for name in values} - known


def test_the_table_of_recipes_in_the_documentation_is_theirs(exported, repository):
    """docs/train.md: a row per recipe, with rows x accumulation on one node, of both phases."""
    text = (repository / "docs" / "train.md").read_text()
    for path in RECIPES:
        one, two = (exported[path.name, phase, "1", "1"] for phase in "12")
        cells = [f"{v['BATCHSIZE']} x {v['GRADIENT_STEPS']}" for v in (one, two)]
        assert f"| `{path.stem}` | {cells[0]} | {cells[1]} |" in text, cells


@pytest.mark.parametrize("name", ["day_RTX4090", "day_RTX6000", "day_A100", "day_H100"])
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_a_day_plans_its_hours_with_the_published_batch(name, gpus):
    values = sourced(name, DGXNGPU=str(gpus))
    data = from_env(loader.LoaderConfig, values)
    rates = from_env(schedule.ScheduleConfig, values)
    assert data.rows_per_step * gpus == 4096
    assert (values["NSP"], values["NUM_PHASES"]) == ("0", "1")
    assert (data.max_seq_length, data.masking) == (128, "dynamic")
    one = from_env(schedule.ScheduleConfig, sourced(name, DGXNGPU="1"))
    assert abs(rates.max_steps - gpus * one.max_steps) < gpus


@pytest.mark.parametrize("gpu", ["RTX4090", "RTX6000", "A100", "H100"])
def test_a_model_is_continued_from_its_folder(gpu):
    for gpus in (1, 4, 8):
        model = "/models/bert-base-uncased"
        given = {"DGXNGPU": str(gpus), "INIT_CHECKPOINT": model}
        values = sourced(f"continue_{gpu}", **given)
        data = from_env(loader.LoaderConfig, values)
        assert (values["INIT_CHECKPOINT"], data.rows_per_step * gpus) == (model, 256)
        assert from_env(schedule.ScheduleConfig, values).lr == 1e-4
        assert data.source[0] == Path("/data/packed_data")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        sourced(f"continue_{gpu}")
    how = "export the folder of the model to continue"
    assert refused.value.stderr.endswith(f"INIT_CHECKPOINT: is not set: {how}\n")


def sourced(name: str, **before: str) -> dict[str, str]:
    """Exports of a recipe for your own text."""
    done = subprocess.run(
        ["bash", "-c", f'set -eu; source "./pretrain_{name}.sh"; env -0'], cwd=CONFIGS, check=True, text=True,
        env={"PATH": "/usr/bin:/bin", "DATADIR": "/data"} | before, capture_output=True,
    )  # fmt: skip
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if item)


@pytest.mark.parametrize("word", ["1", "true", "Yes", "ON"])
def test_packed_rows_are_counted_in_each_word_that_the_trainer_takes(word):
    script = "PHASE=2 source ./pretrain_large_H100.sh; echo $PACKING_FACTOR"
    done = subprocess.run(
        ["bash", "-euc", script], cwd=CONFIGS, env={"PATH": "/usr/bin:/bin", "PACKED": word},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "2\n"
