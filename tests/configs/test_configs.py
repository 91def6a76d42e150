"""Every config sources cleanly, exports only names that are read, and describes a run that --check accepts."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from bert.pretraining import check, closed_division
from bert.pretraining.config import PretrainingConfig
from common import env
from review.rulebook import rcp

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ALL = sorted(CONFIGS.glob("config_*.sh"))
NAME = re.compile(
    r"config_(?P<system>\w+)_(?P<nodes>\d+)x(?P<gpus>\d+)x(?P<batch>\d+)x(?P<accum>\d+)(?P<pack>_pack)?"
    r"(_(?P<model>[\d.]+b(_\d+)?))?\.sh"
)
LARGE = [
    path for path in ALL if (name := NAME.fullmatch(path.name)) and name["model"]
]  # beyond the benchmark's
SYSTEMS = [path for path in ALL if path not in LARGE and "demo" not in path.name]
READ_ELSEWHERE = {
    "WALLTIME",  # the user's line: sbatch -t "$WALLTIME"
    "SBATCH_TIMELIMIT",  # sbatch
    "CONFIG_EXPORTS",  # launch/run/exports.sh, when the next config is sourced
}
BERT_LARGE = {"vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24}
BERT_LARGE |= {"num_attention_heads": 16, "intermediate_size": 4096}
BERT_LARGE |= {"max_position_embeddings": 512}


def exports(config: Path, **before: str) -> dict[str, str]:
    """Variables that a config exports into an empty environment, under ``set -eu``."""
    script = (
        'set -eu; before=$(compgen -e); source "$1"; comm -13 <(sort <<<"$before") <(compgen -e | sort) | '
        + ('while read -r name; do printf "%s=%s\\0" "$name" "${!name}"; done')
    )
    command = ["bash", "-c", script, "bash", str(config)]
    environment = {"PATH": "/usr/bin:/bin"} | before
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.replace("\0", "").strip() or not done.stderr, done.stderr
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if item)


@pytest.fixture(scope="module")
def exported() -> dict[str, dict[str, str]]:
    return {path.name: exports(path) for path in ALL}


@pytest.fixture
def load(tmp_path, exported):
    """load(config, **site) -> the run it describes, on synthetic data and with BERT-large's shape."""
    (tmp_path / "bert_config.json").write_text(json.dumps(BERT_LARGE))

    def load(path: Path, **site: str) -> PretrainingConfig:
        values = exported[path.name]
        world = int(values["DGXNNODES"]) * int(values["DGXNGPU"])
        data = {"SYNTH_DATA": "1", "CHECKPOINTDIR_PHASE1": str(tmp_path)}
        environ = values | data | {"WORLD_SIZE": str(world), "DEVICE": "cpu"}
        config = env.from_env(PretrainingConfig, environ | site)
        config.check()
        return config

    return load


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_the_name_of_a_config_is_what_it_exports(path, exported):
    name, values = NAME.fullmatch(path.name), exported[path.name]
    assert name, "config_<SYSTEM>_<NODES>x<GPUS>x<BATCH>x<ACCUM>[_pack].sh"
    parts = {"nodes": "DGXNNODES", "gpus": "DGXNGPU"}
    parts |= {"batch": "BATCHSIZE", "accum": "GRADIENT_STEPS"}
    for part, variable in parts.items():
        assert values[variable] == name[part], variable
    if name["model"]:
        model = CONFIGS / "models" / f"bert_{name['model']}.json"
        assert values["BERT_CONFIG"] == str(model)
    assert values["PACKED"] == str(int(name["pack"] is not None))
    assert values["DGXSYSTEM"] == path.stem.removeprefix("config_")


@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.stem)
def test_a_config_is_checked_and_prints_batch_interval_and_reference_convergence(
    path, load, tmp_path, monkeypatch
):
    # What is estimated of 24 layers takes longer, and nothing below depends on it.
    (tmp_path / "shallow").mkdir()
    shallow = json.dumps(BERT_LARGE | {"num_hidden_layers": 2})
    (tmp_path / "shallow" / "bert_config.json").write_text(shallow)
    # CPUs stand in for a node of GPUs.
    monkeypatch.setattr("bert.pretraining.memory.host_capacity", lambda: 1 << 50)
    config = load(path, CHECKPOINTDIR_PHASE1=str(tmp_path / "shallow"))
    lines = dict(line.split("  ", 1) for line in check.report(config).splitlines())
    lines = {name.strip(): text.strip() for name, text in lines.items()}
    said = re.search(
        r"global batch ([\d,]+) sequences", " ".join(path.read_text().split("\n#"))
    )
    assert said, "a config says its global batch in its comment"
    assert config.global_batch_size == int(said[1].replace(",", ""))
    assert lines["global batch"].startswith(f"{config.global_batch_size} sequences")
    assert config.evaluate.every_samples == config.evaluate.start_samples
    interval = closed_division.rule_interval(config.global_batch_size)
    assert config.evaluate.every_samples == interval
    if config.mlperf.division == "closed":
        reference, _ = rcp.find(config.global_batch_size)
        enough = config.max_steps * config.global_batch_size > reference.minimum
        assert enough, "it ends before a run can converge"
    assert config.mlperf.division == ("open" if "Samsung" in path.name else "closed")
    assert config.evaluate.target == 0.72


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_config_of_a_large_model_is_the_published_recipe(path, load, tmp_path):
    config = load(path, CHECKPOINT_DIR=str(tmp_path / "checkpoints"))
    assert config.global_batch_size == 12_288
    assert (config.data.max_seq_length, config.optim.optimizer) == (128, "lans")
    assert (config.schedule.schedule, config.schedule.lr) == ("poly", 1.5e-3)
    assert config.schedule.warmup[0] == 0.05 * config.max_steps
    assert config.max_steps == (155_000 if "1.5b" in path.name else 75_000)
    assert config.model.layer_norm_large_model
    assert not list(config.evaluation_steps)


def test_every_exported_name_is_read(repository, exported):
    scripts = [
        *repository.glob("run*.s*"),
        *(repository / "launch").rglob("*.sh"),
        CONFIGS / "common.sh",
    ]
    text = "".join(path.read_text() for path in scripts)
    read = {*re.findall(r"\$\{?[!#]?([A-Z][A-Z0-9_]+)", text)} | READ_ELSEWHERE
    read |= {variable.name for _, variable, _ in env.variables(PretrainingConfig)}
    for config, values in exported.items():
        unread = set(values) - read
        assert not unread, f"{config} exports {unread}, which nobody reads"


def test_sourcing_one_closed_config_after_another_leaves_nothing_of_the_first(exported):
    every = [exported[path.name] for path in SYSTEMS]
    closed = [values for values in every if "SUBMISSION_DIVISION" not in values]
    assert len(closed) == len(SYSTEMS) - 1
    assert len({frozenset(values) for values in closed}) == 1, "the same names"


def test_configs_only_export_between_begin_and_common():
    here = 'source "$(dirname -- "${BASH_SOURCE[0]}")'
    for path in [*ALL, CONFIGS / "global_batch_768.sh"]:
        text = path.read_text().splitlines()
        lines = [line for line in text if line and line[0] != "#"]
        if path in ALL:
            guard, first, *lines, last = lines
            assert "is for bash" in guard
            assert (first, last) == (f'{here}/begin.sh"', f'{here}/common.sh"')
        for line in lines:
            assert re.match(r"export [A-Z_0-9]+=|source ", line), f"{path.name}: {line}"


def test_the_order_of_site_and_config_does_not_matter(repository):
    configs = [f"configs/{path.name}" for path in ALL]
    script = "".join(
        f"(source {first}; source {second}; export -p; printf '\\1')\n"
        for config in configs
        for first, second in (("./env.sh", config), (config, "./env.sh"))
    )
    options = {"cwd": repository, "env": {"PATH": "/usr/bin:/bin"}, "text": True}
    printed = subprocess.check_output(["bash", "-euc", script], **options)
    found = [
        {line for line in text.splitlines() if "_EXPORTS=" not in line}
        for text in printed.split("\1")[:-1]
    ]
    assert len(found) == 2 * len(configs)
    for config, *both in zip(configs, found[::2], found[1::2], strict=True):
        assert both[0] == both[1], config


@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.stem)
def test_a_published_config_keeps_every_rule_of_its_division(path, load, tmp_path):
    """With a site's files and dropped caches it starts."""
    folder, weights = str(tmp_path), tmp_path / "model.ckpt-28252.pt"
    weights.touch()
    folders = "DATADIR_PHASE2", "DATADIR_PHASE2_PACKED", "EVALDIR"
    site = dict.fromkeys(folders, folder) | {"SYNTH_DATA": "0", "CACHE_CLEARED": "1"}
    config = load(path, INIT_CHECKPOINT=str(weights), **site)
    closed_division.check(config, starts=True)
    if config.mlperf.division == "closed":
        assert not list(closed_division.violations(config))


def test_the_time_limit_grows_with_the_number_of_trials():
    path = CONFIGS / "config_P8000H100_1x8x48x1_pack.sh"
    one, ten = (exports(path, NEXP=count) for count in ("1", "10"))
    per_trial = int(one["WALLTIME_RUNANDTIME"]) + 5
    assert int(ten["WALLTIME"]) - int(one["WALLTIME"]) == 9 * per_trial
    assert ten["SBATCH_TIMELIMIT"] == ten["WALLTIME"]


def test_the_table_of_configs_in_the_documentation_is_theirs(repository, exported):
    """docs/launch.md: a row per recipe, with its configs; system and size are in their names."""
    text = (repository / "docs" / "launch.md").read_text()
    for path in SYSTEMS:
        values = exported[path.name]
        names = "DGXNNODES", "DGXNGPU", "BATCHSIZE", "GRADIENT_STEPS"
        nodes, gpus, rows, steps = (int(values[name]) for name in names)
        batch = nodes * gpus * rows * steps * int(values["PACKING_FACTOR"])
        cells = [f"{batch:,}", f"{float(values['LR']):g}"]
        cells.append(f"{int(values['EVAL_ITER_SAMPLES']):,}")
        start = f"| {' | '.join(cells)} |"
        (row,) = [line for line in text.splitlines() if line.startswith(start)]
        assert f"`{path.stem.removeprefix('config_')}`" in row, (path.stem, cells)
        size = f"_{nodes}x{gpus}x{rows}x{steps}" + "_pack" * (values["PACKED"] == "1")
        assert path.stem.endswith(size), path.stem


def test_the_table_of_large_models_in_the_documentation_is_theirs(repository, exported):
    """docs/train.md: a row per config."""
    text = (repository / "docs" / "train.md").read_text()
    for path in LARGE:
        values = exported[path.name]
        gpus = int(values["DGXNNODES"]) * int(values["DGXNGPU"])
        batch = f"{values['BATCHSIZE']} sequences x {values['GRADIENT_STEPS']}"
        steps = int(values["MAX_STEPS"])
        row = f"| `{path.stem}` | {gpus:,} | {batch} | {steps:,} |"
        assert row in text, row
