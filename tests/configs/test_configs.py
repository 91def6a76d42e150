"""Every config sources cleanly, exports only names that are read, and describes a run that --check
accepts.
"""

from __future__ import annotations

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
BERT_LARGE = {
    "vocab_size": 30522,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "max_position_embeddings": 512,
}


def exports(config: Path, **before: str) -> dict[str, str]:
    """Variables that a config exports into an empty environment, under ``set -eu``."""
    script = (
        'set -eu; before=$(compgen -e); source "$1"; comm -13 <(sort <<<"$before") <(compgen -e | sort) | '
        + ('while read -r name; do printf "%s=%s\\0" "$name" "${!name}"; done')
    )
    command = ["bash", "-c", script, "bash", str(config)]
    done = subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin"} | before,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.replace("\0", "").strip() or not done.stderr, done.stderr
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if item)


@pytest.fixture(scope="module")
def exported() -> dict[str, dict[str, str]]:
    return {path.name: exports(path) for path in ALL}


@pytest.fixture
def load(tmp_path, exported):
    """load(config, **site) -> the run it describes, on synthetic data and with BERT-large's
    shape.
    """
    (tmp_path / "bert_config.json").write_text(json.dumps(BERT_LARGE))

    def load(path: Path, **site: str) -> PretrainingConfig:
        values = exported[path.name]
        world = int(values["DGXNNODES"]) * int(values["DGXNGPU"])
        environ = values | {
            "SYNTH_DATA": "1",
            "CHECKPOINTDIR_PHASE1": str(tmp_path),
            "WORLD_SIZE": str(world),
            "DEVICE": "cpu",
        }
        config = env.from_env(PretrainingConfig, environ | site)
        config.check()
        return config

    return load


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_the_name_of_a_config_is_what_it_exports(path, exported):
    name, values = NAME.fullmatch(path.name), exported[path.name]
    assert name, "config_<SYSTEM>_<NODES>x<GPUS>x<BATCH>x<ACCUM>[_pack].sh"
    for part, variable in (
        ("nodes", "DGXNNODES"),
        ("gpus", "DGXNGPU"),
        ("batch", "BATCHSIZE"),
        ("accum", "GRADIENT_STEPS"),
    ):
        assert values[variable] == name[part], variable
    if name["model"]:
        assert values["BERT_CONFIG"] == str(
            CONFIGS / "models" / f"bert_{name['model']}.json"
        )
    assert values["PACKED"] == str(int(name["pack"] is not None))
    assert values["DGXSYSTEM"] == path.stem.removeprefix("config_")


@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.stem)
def test_a_config_is_checked_and_prints_batch_interval_and_reference_convergence(
    path, load, tmp_path, monkeypatch
):
    (
        tmp_path / "shallow"
    ).mkdir()  # what is estimated of 24 layers takes longer, and nothing below depends on it
    (tmp_path / "shallow" / "bert_config.json").write_text(
        json.dumps(BERT_LARGE | {"num_hidden_layers": 2})
    )
    monkeypatch.setattr(
        "bert.pretraining.memory.host_capacity", lambda: 1 << 50
    )  # CPUs stand in for a node of GPUs
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
    assert config.evaluate.every_samples == closed_division.rule_interval(
        config.global_batch_size
    )
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
    read = {
        name
        for path in scripts
        for name in re.findall(r"\$\{?[!#]?([A-Z][A-Z0-9_]+)", path.read_text())
    }
    read |= {
        variable.name for _, variable, _ in env.variables(PretrainingConfig)
    } | READ_ELSEWHERE
    for config, values in exported.items():
        unread = set(values) - read
        assert not unread, f"{config} exports {unread}, which nobody reads"


def test_sourcing_one_closed_config_after_another_leaves_nothing_of_the_first(exported):
    closed = [
        exported[path.name]
        for path in SYSTEMS
        if "SUBMISSION_DIVISION" not in exported[path.name]
    ]
    assert len(closed) == len(SYSTEMS) - 1
    assert len({frozenset(values) for values in closed}) == 1, (
        "all configs of the closed division export the same names"
    )


def test_configs_only_export_between_begin_and_common():
    for path in [*ALL, CONFIGS / "global_batch_768.sh"]:
        lines = [
            line
            for line in path.read_text().splitlines()
            if line and not line.startswith("#")
        ]
        if path in ALL:
            guard, first, *lines, last = lines
            assert "is for bash" in guard
            assert (first, last) == tuple(
                f'source "$(dirname -- "${{BASH_SOURCE[0]}}")/{name}.sh"'
                for name in ("begin", "common")
            )
        for line in lines:
            assert re.match(r"export [A-Z_0-9]+=|source ", line), f"{path.name}: {line}"


def test_the_order_of_site_and_config_does_not_matter(repository):
    configs = [f"configs/{path.name}" for path in ALL]
    script = "".join(
        f"(source {first}; source {second}; export -p; printf '\\1')\n"
        for config in configs
        for first, second in (("./env.sh", config), (config, "./env.sh"))
    )
    command, environment = ["bash", "-euc", script], {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command,
        cwd=repository,
        env=environment,
        capture_output=True,
        check=True,
        text=True,
    )
    found = [
        {line for line in text.splitlines() if "_EXPORTS=" not in line}
        for text in done.stdout.split("\1")[:-1]
    ]
    assert len(found) == 2 * len(configs)
    for config, site_first, config_first in zip(
        configs, found[::2], found[1::2], strict=True
    ):
        assert site_first == config_first, config


@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.stem)
def test_a_published_config_keeps_every_rule_of_its_division(path, load, tmp_path):
    """With a site's files and dropped caches it starts."""
    folder, weights = str(tmp_path), tmp_path / "model.ckpt-28252.pt"
    weights.touch()
    site = {
        "SYNTH_DATA": "0",
        "DATADIR_PHASE2": folder,
        "DATADIR_PHASE2_PACKED": folder,
        "EVALDIR": folder,
    }
    config = load(path, INIT_CHECKPOINT=str(weights), CACHE_CLEARED="1", **site)
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
        nodes, gpus, rows, steps = (
            int(values[n])
            for n in ("DGXNNODES", "DGXNGPU", "BATCHSIZE", "GRADIENT_STEPS")
        )
        batch = nodes * gpus * rows * steps * int(values["PACKING_FACTOR"])
        cells = [
            f"{batch:,}",
            f"{float(values['LR']):g}",
            f"{int(values['EVAL_ITER_SAMPLES']):,}",
        ]
        row = next(
            (
                line
                for line in text.splitlines()
                if line.startswith(f"| {' | '.join(cells)} |")
            ),
            "",
        )
        assert f"`{path.stem.removeprefix('config_')}`" in row, (path.stem, cells)
        size = f"_{nodes}x{gpus}x{rows}x{steps}" + "_pack" * (values["PACKED"] == "1")
        assert path.stem.endswith(size), path.stem


def test_the_table_of_large_models_in_the_documentation_is_theirs(repository, exported):
    """docs/train.md: a row per config."""
    text = (repository / "docs" / "train.md").read_text()
    for path in LARGE:
        values = exported[path.name]
        gpus = int(values["DGXNNODES"]) * int(values["DGXNGPU"])
        cells = [
            f"`{path.stem}`",
            f"{gpus:,}",
            f"{values['BATCHSIZE']} sequences x {values['GRADIENT_STEPS']}",
        ]
        row = f"| {' | '.join(cells)} | {int(values['MAX_STEPS']):,} |"
        assert row in text, row
