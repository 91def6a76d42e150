"""CONTRIBUTING.md's table is true: each part is added by a file, here a function, and the one line
that it names. Optimizers: tests/bert/optim/test_new_optimizer.py; container runtimes:
tests/launch/test_runtimes.py; attention backends: tests/bert/kernels/test_attention_libraries.py;
tasks: tests/bert/training/test_another_task.py.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

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
from review.acceptance.records import Records
from review.acceptance.schema import TABLES

from .bert.kernels.fused_cases import Case
from .bert.kernels.test_fused import compare
from .configs.test_configs import BERT_LARGE, CONFIGS, exports
from .review.acceptance.made_up import make

CPU = torch.device("cpu")
Edited = Callable[..., ModuleType]


@pytest.fixture
def edited() -> Edited:
    """edited(name, {after: line}, **new) -> a copy of the module with lines added; new: what they
    import.
    """

    def edited(name: str, lines: dict[str, str], **new: object) -> ModuleType:
        path = Path(str(importlib.util.find_spec(name).origin))  # type: ignore[union-attr]
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


def test_a_metric_is_one_line(edited: Edited) -> None:
    metrics = edited(
        "bert.training.metrics",
        {
            '        values = {\n            "step": step,\n': '"span_steps": span_steps,\n'
        },
    )
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
    for _ in range(3):
        progress.add(
            StepResult(Losses(ones, ones), ones, ones.bool()),
            [SimpleNamespace(num_sequences=2)],
        )
    progress.report(3, 3)
    assert told[0]["span_steps"] == 3


def test_a_schedule_is_a_function_and_a_line(edited: Edited) -> None:
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


def test_an_area_of_the_acceptance_test_is_an_entry_and_a_line(
    edited: Edited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLES["areas"], "labels", "labels of nodes")
    coverage = edited(
        "review.acceptance.coverage",
        {
            '        reasons["telemetry"] = NO_NVML\n': '    reasons["labels"] = "none"\n'
        },
    )
    gap = coverage.Gap("node1", "labels of nodes", "none", ("labels",))
    assert gap in coverage.gaps(make(2, 4), {}, True)


def test_a_port_counter_is_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counter = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters/discards"
    counter.parent.mkdir(parents=True)
    counter.write_text("7\n")
    names = [*TABLES["port_counters"], "discards"]
    monkeypatch.setitem(TABLES, "port_counters", names)
    counts = hardware.health(hardware.Gpus([]), tmp_path)["mlx5_0/1"]
    assert counts["discards"] == 7


def test_what_contributing_names_is_made_in_the_file_that_it_names(
    repository: Path,
) -> None:
    text = (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")
    places = re.findall(r"`(\w+)`,? of\s`([\w/]+\.(?:py|yaml))`", text)
    assert len(places) > 10
    for name, file in places:
        candidates = [
            path
            for root in (
                "common",
                "implementations",
                "input_preprocessing",
                "review",
                "tests",
            )
            for path in (repository / root).rglob("*" + Path(file).suffix)
            if f"/{path.relative_to(repository)}".endswith(f"/{file}")
        ]
        assert any(_makes(path, name) for path in candidates), f"{name} of {file}"


def _makes(path: Path, name: str) -> bool:
    """Whether a file has this key, function, class or value, itself and not by another name."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        return re.search(rf"^{name}:", text, re.MULTILINE) is not None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                made = ast.Dict | ast.Set | ast.Tuple | ast.List | ast.Constant
                return isinstance(node.value, made)
    return False


def test_an_acceptance_check_is_a_function_and_a_line(edited: Edited) -> None:
    def unlabelled(records: Records) -> Iterator[Reason]:
        yield from (Reason(node, "has no label", "warn") for node in records.nodes)

    verdict = edited(
        "review.acceptance.verdict",
        {"            *gpu_faults(records),\n": "*unlabelled(records),\n"},
        unlabelled=unlabelled,
    )
    result = verdict.judge(make(2, 4))
    assert [fault.name for fault in result.faults] == ["node0", "node1"]
    assert result.state == "warn"


def test_a_data_stage_is_a_module_its_line_and_its_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def main(options: object) -> None:
        (tmp_path / "words").write_text(str(options.number))  # type: ignore[attr-defined]

    module = ModuleType("input_preprocessing.text.words")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(STAGES, "words", ("text.words.main", "count words"))
    monkeypatch.setitem(cli.OPTIONS, "words", {"--number": {"type": "positive"}})
    monkeypatch.setattr(sys, "argv", ["input_preprocessing", "--number", "3"])
    cli.run_stage("words")
    assert (tmp_path / "words").read_text() == "3"


def test_a_kernel_is_a_module_its_line_and_its_field(
    edited: Edited, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return 2 * x * g

    case = Case(
        "odd", torch.float32, 1e-6, "one rounding", lambda draw: (draw.normal(7, 13),)
    )
    squared = SimpleNamespace(reference=torch.square, fused=Squared.apply)
    kernels = edited(
        "bert.kernels",
        {
            '    "cross_entropy": cross_entropy,\n': '"squared": squared,\n',
            "    cross_entropy: Callable[..., Tensor]\n": "    squared: Callable[..., Tensor]\n",
        },
        squared=squared,
    )
    monkeypatch.setattr(triton_support, "missing", lambda device: "")
    for fused, bound in (("none", squared.reference), ("squared", squared.fused)):
        config = kernels.KernelsConfig(fused=fused)
        assert kernels.bind_kernels(config, CPU).squared == bound
    monkeypatch.setitem(OPERATIONS, "squared", squared)
    compare("squared", case, CPU)  # as the test that walks the folder does


def test_a_system_is_a_file_of_exports(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    shutil.copytree(CONFIGS, folder)
    (tmp_path / "launch").symlink_to(CONFIGS.parent / "launch")
    nearest = (folder / "config_H100_1x4x48x2_pack.sh").read_text(encoding="utf-8")
    new = folder / "config_B300_1x4x96x1_pack.sh"
    new.write_text(
        nearest.replace("BATCHSIZE=48 GRADIENT_STEPS=2", "BATCHSIZE=96"),
        encoding="utf-8",
    )
    (tmp_path / "bert_config.json").write_text(json.dumps(BERT_LARGE))
    site = {
        "SYNTH_DATA": "1",
        "CHECKPOINTDIR_PHASE1": str(tmp_path),
        "WORLD_SIZE": "4",
        "DEVICE": "cpu",
    }
    exported = exports(new)
    assert exported["DGXSYSTEM"] == "B300_1x4x96x1_pack"
    config = from_env(PretrainingConfig, exported | site)
    config.check()
    assert config.global_batch_size == 4 * 96 * config.data.packing_factor
