"""CONTRIBUTING.md's table is true: each part is added by a file, here a function, and the one line that it names.
Optimizers: tests/bert/optim/test_new_optimizer.py; container runtimes: tests/launch/test_runtimes.py; attention
backends: tests/bert/kernels/test_attention_backends.py; tasks: tests/bert/training/test_another_task.py.
"""

import importlib.util
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bert.core.dist import DistConfig, World
from bert.kernels import OPERATIONS
from bert.kernels.support import triton_support
from bert.model.bert import Losses
from bert.pretraining.config import PretrainingConfig
from bert.training.schedule import ScheduleRule, after_warmup
from bert.training.step import StepResult
from certify import hardware
from common.env import ConfigError, from_env
from input_preprocessing import STAGES
from input_preprocessing.stage import cli
from review.acceptance.journal import Reason
from review.acceptance.schema import TABLES

from .bert.kernels.fused_cases import Case
from .bert.kernels.test_fused import compare
from .configs.test_configs import BERT_LARGE, CONFIGS, exports
from .review.acceptance.made_up import make

CPU = torch.device("cpu")


@pytest.fixture
def edited():
    """edited(name, {after: line}, **new) -> a copy of the module with lines added; new: what they import."""

    def edited(name, lines, **new):
        path = Path(importlib.util.find_spec(name).origin)
        source = path.read_text(encoding="utf-8")
        for after, line in lines.items():
            assert source.count(after) == 1, f"{name}: {after!r}"
            source = source.replace(after, after + line)
        module = ModuleType(name)
        module.__dict__.update(new, __file__=str(path))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, name, module)  # where dataclasses look
            exec(compile(source, path, "exec"), vars(module))
        return module

    return edited


def test_a_metric_is_one_line(edited):
    place = '        values = {\n            "step": step,\n'
    metrics = edited("bert.training.metrics", {place: '"span_steps": span_steps,\n'})
    told = []
    progress = metrics.Progress(
        World(DistConfig(device="cpu")),
        last=10,
        rate=lambda step: 0.1,
        epochs=lambda batches, samples: 0.0,
        skips_overflows=False,
        sinks=[lambda kind, values: told.append(dict(values))],
    )
    ones = torch.ones(())
    result = StepResult(Losses(ones, ones), ones, ones.bool())
    for _ in range(3):
        progress.add(result, [SimpleNamespace(num_sequences=2)])
    progress.report(3, 3)
    assert told[0]["span_steps"] == 3


def test_a_schedule_is_a_function_and_a_line(edited):
    schedule = edited(
        "bert.training.schedule",
        {'    "linear": ScheduleRule(linear, degree=1.0),\n': '"flat": flat,\n'},
        flat=ScheduleRule(after_warmup(lambda step, config: config.lr)),
    )
    environ = {"LR": "0.5", "MAX_STEPS": "8", "WARMUP_STEPS": "2"}
    config = from_env(schedule.ScheduleConfig, environ | {"LR_SCHEDULE": "flat"})
    config.check()
    assert schedule.describe(config).startswith("flat: 0.25 at step 1, 0.5 at step 2,")
    with pytest.raises(ConfigError, match="LR_SCHEDULE=flat does not use END_LR"):
        replace(config, end_lr=0.1).check()


def test_an_area_of_the_acceptance_test_is_an_entry_and_a_line(edited, monkeypatch):
    monkeypatch.setitem(TABLES["areas"], "labels", "labels of nodes")
    place = '        reasons["telemetry"] = NO_NVML\n'
    line = '    reasons["labels"] = "none"\n'
    coverage = edited("review.acceptance.coverage", {place: line})
    gap = coverage.Gap("node1", "labels of nodes", "none", ("labels",))
    assert gap in coverage.gaps(make(2, 4), {}, True)


def test_a_port_counter_is_a_word(monkeypatch, tmp_path):
    counter = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters/discards"
    counter.parent.mkdir(parents=True)
    counter.write_text("7\n")
    names = [*TABLES["port_counters"], "discards"]
    monkeypatch.setitem(TABLES, "port_counters", names)
    counts = hardware.health(hardware.Gpus([]), tmp_path)["mlx5_0/1"]
    assert counts["discards"] == 7


def test_what_contributing_names_is_made_in_the_file_that_it_names(repository):
    text = (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")
    places = re.findall(r"`(\w+)`,? of\s`([\w/]+\.(?:py|yaml))`", text)
    assert len(places) > 10
    roots = "common", "implementations", "input_preprocessing", "review", "tests"
    for name, file in places:
        kind = "*" + Path(file).suffix
        paths = [path for root in roots for path in (repository / root).rglob(kind)]
        named = [path for path in paths if str(path).endswith(f"/{file}")]
        # A key, a function, a class or a value: itself, not by another name.
        made = rf"^(?:{name}:| *(?:def|class) {name}\b| *{name}(?:: .*)? = [^a-zA-Z_])"
        texts = [path.read_text(encoding="utf-8") for path in named]
        assert any(re.search(made, text, re.M) for text in texts), f"{name} of {file}"


def test_an_acceptance_check_is_a_function_and_a_line(edited):
    def unlabelled(records):
        yield from (Reason(node, "has no label", "warn") for node in records.nodes)

    place = "            *gpu_faults(records),\n"
    line = {place: "*unlabelled(records),\n"}
    verdict = edited("review.acceptance.verdict", line, unlabelled=unlabelled)
    result = verdict.judge(make(2, 4))
    assert [fault.name for fault in result.faults] == ["node0", "node1"]
    assert result.state == "warn"


def test_a_data_stage_is_a_module_its_line_and_its_options(monkeypatch, tmp_path):
    def main(options):
        (tmp_path / "words").write_text(str(options.number))

    module = ModuleType("input_preprocessing.text.words")
    module.main = main
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(STAGES, "words", ("text.words.main", "count words"))
    monkeypatch.setitem(cli.OPTIONS, "words", {"--number": {"type": "positive"}})
    monkeypatch.setattr(sys, "argv", ["input_preprocessing", "--number", "3"])
    cli.run_stage("words")
    assert (tmp_path / "words").read_text() == "3"


def test_a_kernel_is_a_module_its_line_and_its_field(edited, monkeypatch):
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    build = lambda draw: (draw.normal(7, 13),)  # noqa: E731
    case = Case("odd", torch.float32, 1e-6, "one rounding", build)
    squared = SimpleNamespace(reference=torch.square, fused=Squared.apply)
    lines = {
        '    "cross_entropy": cross_entropy,\n': '"squared": squared,\n',
        "    cross_entropy: Callable[..., Tensor]\n": "    squared: Callable[..., Tensor]\n",
    }
    kernels = edited("bert.kernels", lines, squared=squared)
    monkeypatch.setattr(triton_support, "missing", lambda device: "")
    for fused, bound in (("none", squared.reference), ("squared", squared.fused)):
        config = kernels.KernelsConfig(fused=fused)
        assert kernels.bind_kernels(config, CPU).squared == bound
    monkeypatch.setitem(OPERATIONS, "squared", squared)
    compare("squared", case, CPU)  # as the test that walks the folder does


def test_a_system_is_a_file_of_exports(tmp_path):
    folder = tmp_path / "configs"
    shutil.copytree(CONFIGS, folder)
    (tmp_path / "launch").symlink_to(CONFIGS.parent / "launch")
    nearest = (folder / "config_H100_1x4x48x2_pack.sh").read_text(encoding="utf-8")
    new = folder / "config_B300_1x4x96x1_pack.sh"
    new.write_text(nearest.replace("BATCHSIZE=48 GRADIENT_STEPS=2", "BATCHSIZE=96"))
    (tmp_path / "bert_config.json").write_text(json.dumps(BERT_LARGE))
    site = {"SYNTH_DATA": "1", "CHECKPOINTDIR_PHASE1": str(tmp_path), "WORLD_SIZE": "4", "DEVICE": "cpu"}  # fmt: skip
    exported = exports(new)
    assert exported["DGXSYSTEM"] == "B300_1x4x96x1_pack"
    config = from_env(PretrainingConfig, exported | site)
    config.check()
    assert config.global_batch_size == 4 * 96 * config.data.packing_factor
