"""GPU benchmarks run end to end at a tiny size; their counts are correct, and tables show what is missing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from ..forked import interpreter_with


@pytest.fixture
def bench(repository, monkeypatch):
    """import_(name): a module of bench/."""
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module


# What the one command must do without: found by no import, as if it were not installed. Its items are forked from a
# process that has imported what they use of the rest.
WITHOUT = """
import os, sys
sys.executable = os.environ.get("PYTHON_OF_ITEMS", sys.executable)
from importlib.machinery import PathFinder
absent = {"scipy", "numba", "mlperf_logging", "rich", "resvg_py", "jinja2", "pytest", "hypothesis"}
find = PathFinder.find_spec.__func__
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name in absent else find(cls, name, *rest))
"""
USED = [
    "torch",
    "transformers.models.bert.modeling_bert",
    "bert.kernels",
    "bert.model.bert",
    "bert.training.graph",
]


def test_one_command_checks_and_measures_everything_at_a_tiny_size(repository, tmp_path):
    """With only torch, triton, h5py, transformers and their dependencies."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(tmp_path)
    absent = subprocess.run(
        [sys.executable, "-c", "import scipy"], env=environment, capture_output=True, check=False
    )
    assert absent.returncode == 1
    command = [
        sys.executable,
        str(repository / "bench" / "gpu_all.py"),
        "--tiny",
        "--output",
        str(tmp_path),
    ]
    theirs = environment | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(repository / "implementations")])
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        interpreter_with(Path(folder), theirs, USED) as python,
    ):
        environment["PYTHON_OF_ITEMS"] = str(python)
        finished = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert lines[0]["stage"] == "machine"
    results = {line["stage"]: line for line in lines if not line.get("ended")}
    ending = {line["stage"]: line for line in lines if line.get("ended")}
    assert results.keys() == {
        "machine",
        "self_check",
        "steps_24",
        "gemm",
        "profile",
        "convergence",
        "peers",
    }
    assert all(ending[name]["status"] == 0 for name in results), ending
    assert ending["self_check"]["results"] == 11, "a line after each check, and the whole"
    assert results["self_check"]["weight_gradients"] == "ok"
    assert results["self_check"]["way_down"] == []
    assert results["self_check"]["graphs"] == results["self_check"]["finite_steps"] == "ok"
    assert results["gemm"]["tflops"]["64"]["bf16"]["layer"] > 0
    assert all(pair["overlay"] for pair in results["convergence"]["pairs"].values())
    groups = results["steps_24"]["groups"] | results["peers"]["groups"]
    names = [one["variant"] for group in groups.values() for one in group]
    assert names == [
        "ours",
        "ours, fp8",
        "ours",
        "Hugging Face padded, eager",
        "Hugging Face packed, eager",
    ]
    for one in (one for group in groups.values() for one in group):
        assert "problem" not in one, one
        assert one["sequences_per_second"] > 0
        assert one["tokens_per_second"] / one["sequences_per_second"] == pytest.approx(
            32, rel=0.3
        )  # the mean length
    assert results["profile"]["top_kernels"]


def test_operations_are_counted_from_real_lengths(bench):
    torch_lib = bench("torch_lib")
    config = torch_lib.BertConfig(**torch_lib.TINY)
    batch = torch_lib.packed_batches(3, 1, config)[0]
    lengths = np.diff(batch.cu_seqlens.numpy())
    expected = 0.0
    for _ in range(config.num_hidden_layers):
        for length in lengths:
            linear = (
                32 * 96 + 32 * 32 + 32 * 64 + 64 * 32
            )  # QKV, output, feed-forward: multiply-adds a token
            expected += 2 * length * linear + 2 * 2 * length * length * 32
    expected += batch.num_masked * 2 * (32 * 32 + 32 * 211) + len(lengths) * 2 * (32 * 32 + 32 * 2)
    assert torch_lib.model_flops(config, batch) == pytest.approx(3 * expected, rel=1e-12)


def test_the_peer_sees_the_same_words_padded_and_packed(bench):
    torch_lib, train_step = bench("torch_lib"), bench("train_step")
    config = torch_lib.BertConfig(**torch_lib.TINY)
    batch = torch_lib.packed_batches(3, 1, config)[0]
    cpu = torch.device("cpu")
    shape = {name: getattr(config, name) for name in vars(config) if name != "hidden_act"}
    torch.manual_seed(0)
    model = transformers.BertModel(
        transformers.BertConfig(**shape, attn_implementation="sdpa")
    ).eval()
    found = {}
    for packed in (False, True):
        inputs = train_step.inputs_of(batch, 64, packed, cpu)
        labels = inputs.pop("labels")
        inputs.pop("next_sentence_label")
        hidden = model(**inputs).last_hidden_state[labels >= 0]
        found[packed] = (labels[labels >= 0], hidden)
        assert len(inputs["input_ids"]) == (3 if packed else batch.num_sequences)
    assert batch.num_sequences > 3
    assert torch.equal(found[False][0], found[True][0])
    torch.testing.assert_close(found[False][1], found[True][1], atol=1e-5, rtol=1e-4)


def test_tables_say_what_is_unmeasured_and_why(bench, tmp_path):
    gpu_all = bench("gpu_all")
    target = tmp_path / "evidence.md"
    target.write_text(f"before\n{gpu_all.BEGIN}\nold\n{gpu_all.END}\nafter\n")
    gpu_all.write_tables([], target)
    text = target.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("unmeasured") == 12 + 7, "steps, fused kernels"
    one = {"variant": "ours", "rows": 24, "milliseconds": 33.21, "sequences_per_second": 1445.0, "model_tflops": 690.0,
           "tokens_per_second": 367000, "share_of_ceiling": 0.87, "peak_gib": 12.0}  # fmt: skip
    broken = {"variant": "ours, fp8", "rows": 24, "problem": "OutOfMemoryError: no room"}
    steps = {
        "stage": "train_step",
        "ceiling_tflops": 790.0,
        "machine": {"gpu": "G"},
        "groups": {"main": [one, broken]},
    }
    early = one | {"variant": "ours, eager", "early": True}
    theirs = one | {"variant": "Hugging Face padded, eager", "milliseconds": 80.0}
    steps["groups"] |= {"main": [one, broken, early], "peers": [theirs]}
    gpu_all.write_tables([steps, CHECKED], target)
    text = target.read_text()
    assert "| ours | 24 | 33.21 | 1,445 | 367,000 | 690 | 87% | 12.0 |" in text
    assert "| ours, fp8 | 24 | unmeasured (OutOfMemoryError: no room) |" in text
    assert "| ours, eager | 24 | unmeasured (only one turn, 33.2 ms) |" in text
    assert "| ours, FUSED=none | 24 | unmeasured |" in text
    wrong = {"stage": "self_check", "assembly": "ok", "graphs": {"bf16": "differs"}, "machine": {}}
    for found, why in (
        ([wrong, CHECKED | {"status": 1}], "self_check failed: graphs"),
        ([CHECKED | {"status": 124}], "self_check did not succeed"),
        ([], "self_check did not succeed"),
    ):
        gpu_all.write_tables([steps, *found], target)
        text = target.read_text()
        assert f"| ours | 24 | unmeasured (unverified: {why}) |" in text
        assert "| Hugging Face padded, eager | 24 | 80.00 |" in text, "no kernel of ours"


CHECKED = {"stage": "self_check", "ended": True, "status": 0, "seconds": 60, "reason": ""}


def _results(*groups):
    other = ("tokens_per_second", "model_tflops", "share_of_ceiling", "peak_gib")
    made = {}
    for group, variant, rows, rate, *more in groups:
        one = dict.fromkeys(other, 1.0) | {
            "variant": variant,
            "rows": rows,
            "sequences_per_second": rate,
        }
        one |= {"milliseconds": rows * 2e3 / rate} | (more[0] if more else {})
        made.setdefault(group, []).append(one)
    tried = [{"name": "cudnn", "milliseconds": 1.0}, {"name": "triton", "milliseconds": 2.0}]
    tried.append({"name": "flash", "milliseconds": None})
    machine = {"gpu": "1 x NVIDIA H200"}
    return [
        CHECKED,
        {
            "stage": "s",
            "groups": made,
            "tried_attention": tried,
            "machine": machine,
            "ceiling_tflops": 1,
        },
    ]


def test_it_ends_with_the_best_settings_of_this_gpu_and_a_config_of_them(
    bench, repository, tmp_path, capsys
):
    gpu_all = bench("gpu_all")
    results = _results(
        ("rows 48", "ours", 48, 950.0),
        ("rows 48", "ours, fp8", 48, 1150.0),
        ("rows 96", "ours, fp8", 96, 1200.0),
        ("rows 96", "ours", 96, 5000.0, {"early": True}),
        ("peers", "Hugging Face packed, compiled", 24, 9000.0),
    )
    chosen, words = gpu_all.best_settings(results)
    assert chosen == {"PRECISION": "fp8", "BATCHSIZE": "96", "ATTENTION": "cudnn"}
    assert words == "1,200 sequences/s, ours, fp8"
    gpu_all.show(results)
    assert capsys.readouterr().out.endswith(
        f"{words}\nexport PRECISION=fp8 BATCHSIZE=96 ATTENTION=cudnn\n"
    )
    (tmp_path / "configs").mkdir()
    for name in gpu_all.CONFIG_PARTS:
        (tmp_path / "configs" / name).symlink_to(repository / "configs" / name)
    (tmp_path / "launch").symlink_to(repository / "launch")
    (tmp_path / "results.jsonl").write_text(
        "".join(f"{json.dumps(result)}\n" for result in results)
    )
    config = tmp_path / "configs" / "config_MINE_1x1x96x4_pack.sh"
    gpu_all.sys.argv = [
        "gpu_all.py",
        "--results",
        str(tmp_path / "results.jsonl"),
        "--config",
        str(config),
    ]
    assert gpu_all.main() == 0
    script = f"set -euo pipefail; source {config}; echo $DGXSYSTEM $BATCHSIZE $GRADIENT_STEPS $PRECISION $ATTENTION $LR"
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert said.stdout == "MINE_1x1x96x4_pack 96 4 fp8 cudnn 0.00096\n", said.stderr


def test_no_settings_are_chosen_without_valid_figures(bench):
    gpu_all = bench("gpu_all")
    results = _results(("rows 48", "ours", 48, 950.0))
    with pytest.raises(ValueError, match="unverified: self_check did not succeed"):
        gpu_all.config_of(results[1:])
    with pytest.raises(ValueError, match="no step of ours was fully timed"):
        gpu_all.config_of(_results(("rows 48", "ours", 48, 950.0, {"early": True})))


def test_tables_show_the_value_of_each_fused_kernel(bench):
    gpu_all = bench("gpu_all")
    lines = [{"variant": "ours", "milliseconds": 40.0}, {"variant": "ours, FUSED=none", "milliseconds": 60.0},
             {"variant": "ours, without fused lamb", "problem": "no time left"}]  # fmt: skip
    other = (
        "sequences_per_second",
        "tokens_per_second",
        "model_tflops",
        "share_of_ceiling",
        "peak_gib",
    )
    lines = [{"rows": 24} | dict.fromkeys(other, 1.0) | line for line in lines]
    steps = {"stage": "train_step", "ceiling_tflops": 1.0, "groups": {"kernels": lines}}
    text = gpu_all.document([CHECKED, steps])
    assert "| ours, FUSED=none | 60.00 | 1.500 |" in text
    assert "| ours, without fused lamb | unmeasured (no time left) | |" in text
    assert "| ours, without fused bias_gelu | unmeasured | |" in text


def test_a_tiny_run_writes_no_tables(repository, tmp_path):
    command = [sys.executable, str(repository / "bench" / "gpu_all.py"), "--tiny", "--tables"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert "which --tiny does not give" in finished.stderr
    assert not list(tmp_path.iterdir())


def test_tables_refuse_a_document_without_markers_and_a_foreign_results_file(
    bench, tmp_path, capsys, monkeypatch
):
    gpu_all = bench("gpu_all")
    (tmp_path / "plain.md").write_text("no markers\n")
    (tmp_path / "foreign.jsonl").write_text("not json\n")
    (tmp_path / "good.md").write_text(f"{gpu_all.BEGIN}\n{gpu_all.END}\n")
    (tmp_path / "empty.jsonl").write_text("")
    for results, target, reason in (
        ("empty.jsonl", "plain.md", "once each"),
        ("foreign.jsonl", "good.md", "not a"),
    ):
        arguments = ["gpu_all.py", "--tables", "--results", str(tmp_path / results)]
        arguments += ["--document", str(tmp_path / target)]
        monkeypatch.setattr(sys, "argv", arguments)
        before = (tmp_path / target).read_text()
        assert gpu_all.main() == 2
        assert reason in capsys.readouterr().err
        assert (tmp_path / target).read_text() == before


def test_document_in_the_tree_has_the_markers(repository, bench):
    text = (repository / "docs" / "evidence.md").read_text()
    assert text.count(bench("gpu_all").BEGIN) == text.count(bench("gpu_all").END) == 1


def test_self_check_names_the_setting_that_leaves_out_what_is_wrong(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "tests"))
    self_check = importlib.import_module("self_check")
    checked = {check.__name__ for check in self_check.CHECKS}
    assert set(self_check.CURES) == checked - {"assembly"}, "the assembly is left out by itself"
    assert self_check.way_down([]) == []
    assert self_check.way_down(["whole_step", "fused_kernels", "graphs"]) == [
        "CUDA_GRAPH=0", "FUSED=none",
    ]  # fmt: skip
    assert self_check.way_down(["attention_backends"]) == ["ATTENTION=sdpa_loop CUDA_GRAPH=0"]
