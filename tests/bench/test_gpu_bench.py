"""The GPU measurements: they run end to end at a tiny size, count what they say, and their tables hide nothing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers


@pytest.fixture
def bench(repository, monkeypatch):
    """import_(name): a module of bench/."""
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module


# What the one command must do without: found by no import, as if it were not installed.
WITHOUT = """
from importlib.machinery import PathFinder
absent = {"scipy", "numba", "mlperf_logging", "rich", "resvg_py", "jinja2", "pytest", "hypothesis"}
find = PathFinder.find_spec.__func__
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name in absent else find(cls, name, *rest))
"""


def test_one_command_checks_and_measures_everything_at_a_tiny_size(repository, tmp_path):
    """With torch, triton, h5py, transformers and what these depend on, and nothing else."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(tmp_path)
    absent = subprocess.run([sys.executable, "-c", "import scipy"], env=environment, capture_output=True, check=False)
    assert absent.returncode == 1
    command = [sys.executable, str(repository / "bench" / "gpu_all.py"), "--tiny", "--output", str(tmp_path)]
    finished = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert lines[0]["stage"] == "machine"
    results = {line["stage"]: line for line in lines if not line.get("ended")}
    ending = {line["stage"]: line for line in lines if line.get("ended")}
    assert results.keys() == {"machine", "self_check", "steps_24", "gemm", "profile", "convergence", "peers"}
    assert all(ending[name]["status"] == 0 for name in results), ending
    assert ending["self_check"]["results"] == 8, "a line after each check, and the whole"
    assert results["self_check"]["weight_gradients"] == "ok"
    assert results["self_check"]["graphs"] == results["self_check"]["finite_steps"] == "ok"
    assert results["gemm"]["tflops"]["64"]["bf16"]["layer"] > 0
    assert all(pair["overlay"] for pair in results["convergence"]["pairs"].values())
    groups = results["steps_24"]["groups"] | results["peers"]["groups"]
    names = [one["variant"] for group in groups.values() for one in group]
    assert names == ["ours", "ours, fp8", "ours", "Hugging Face padded, eager", "Hugging Face packed, eager"]
    for one in (one for group in groups.values() for one in group):
        assert "problem" not in one, one
        assert one["sequences_per_second"] > 0
        assert one["tokens_per_second"] / one["sequences_per_second"] == pytest.approx(32, rel=0.3)  # the mean length
    assert results["profile"]["top_kernels"]


def test_operations_are_counted_from_the_real_lengths(bench):
    torch_lib = bench("torch_lib")
    config = torch_lib.BertConfig(**torch_lib.TINY)
    batch = torch_lib.packed_batches(3, 1, config)[0]
    lengths = np.diff(batch.cu_seqlens.numpy())
    expected = 0.0
    for _ in range(config.num_hidden_layers):
        for length in lengths:
            linear = 32 * 96 + 32 * 32 + 32 * 64 + 64 * 32  # QKV, output, feed-forward: multiply-adds a token
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
    model = transformers.BertModel(transformers.BertConfig(**shape, attn_implementation="sdpa")).eval()
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
    gpu_all.write_tables(tmp_path / "none", target)
    text = target.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("unmeasured") == 12 + 7 + 2 + 2, "steps, fused kernels, products, profiles"
    one = {"variant": "ours", "rows": 24, "milliseconds": 33.21, "sequences_per_second": 1445.0, "model_tflops": 690.0,
           "tokens_per_second": 367000, "share_of_ceiling": 0.87, "peak_gib": 12.0}  # fmt: skip
    broken = {"variant": "ours, fp8", "rows": 24, "problem": "OutOfMemoryError: no room"}
    steps = {"stage": "train_step", "ceiling_tflops": 790.0, "machine": {"gpu": "G"}, "groups": {"main": [one, broken]}}
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(steps) + "\n")
    gpu_all.write_tables(results, target)
    text = target.read_text()
    assert "| ours | 24 | 33.21 | 1,445 | 367,000 | 690 | 87% | 12.0 |" in text
    assert "| ours, fp8 | 24 | unmeasured (OutOfMemoryError: no room) |" in text
    assert "| ours, eager | 24 | unmeasured |" in text


def test_tables_tell_the_worth_of_each_fused_kernel(bench):
    gpu_all = bench("gpu_all")
    lines = [{"variant": "ours", "milliseconds": 40.0}, {"variant": "ours, FUSED=none", "milliseconds": 60.0},
             {"variant": "ours, without fused lamb", "problem": "no time left"}]  # fmt: skip
    other = ("sequences_per_second", "tokens_per_second", "model_tflops", "share_of_ceiling", "peak_gib")
    lines = [{"rows": 24} | dict.fromkeys(other, 1.0) | line for line in lines]
    text = gpu_all.document([{"stage": "train_step", "ceiling_tflops": 1.0, "groups": {"kernels": lines}}])
    assert "| ours, FUSED=none | 60.00 | 1.500 |" in text
    assert "| ours, without fused lamb | unmeasured (no time left) | |" in text
    assert "| ours, without fused bias_gelu | unmeasured | |" in text


def test_trial_run_writes_no_tables(repository, tmp_path):
    command = [sys.executable, str(repository / "bench" / "gpu_all.py"), "--tiny", "--tables"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert "--tiny are none" in finished.stderr
    assert not list(tmp_path.iterdir())


def test_tables_refuse_a_document_without_markers_and_a_foreign_results_file(bench, tmp_path, capsys, monkeypatch):
    gpu_all = bench("gpu_all")
    (tmp_path / "plain.md").write_text("no markers\n")
    (tmp_path / "foreign.jsonl").write_text("not json\n")
    (tmp_path / "good.md").write_text(f"{gpu_all.BEGIN}\n{gpu_all.END}\n")
    for results, target, reason in (("none", "plain.md", "once each"), ("foreign.jsonl", "good.md", "not a results")):
        arguments = ["gpu_all.py", "tables", "--results", str(tmp_path / results), "--document", str(tmp_path / target)]
        monkeypatch.setattr(sys, "argv", arguments)
        before = (tmp_path / target).read_text()
        assert gpu_all.main() == 2
        assert reason in capsys.readouterr().err
        assert (tmp_path / target).read_text() == before


def test_document_in_the_tree_has_the_markers(repository, bench):
    text = (repository / "docs" / "evidence.md").read_text()
    assert text.count(bench("gpu_all").BEGIN) == text.count(bench("gpu_all").END) == 1
