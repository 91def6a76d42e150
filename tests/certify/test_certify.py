"""certify.sh on this machine: times and weights of every rank are recorded and judged."""

import gc
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from bert.pretraining.config import PretrainingConfig
from bert.training.graph import CaptureError
from certify import load as load_module
from certify.__main__ import certify as run_load
from certify.__main__ import main
from certify.burn_in import BurnIn
from certify.load import Load, LoadConfig, checksum
from certify.store_group import StoreGroup, pairings
from certify.telemetry import Sampler
from common.env import ConfigError, from_env
from review.acceptance.verdict import certify

from ..waiting import processes_with, wait_until

MODEL = {
    "vocab_size": 211, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3,
    "intermediate_size": 40, "max_position_embeddings": 48,
}  # fmt: skip
SETTINGS = {
    "MAX_SEQ_LENGTH": "48", "BATCHSIZE": "2", "CERTIFY_SECONDS": "0.1", "DEVICE": "cpu", "OMP_NUM_THREADS": "1",
}  # fmt: skip
# Of a rank without a launcher.
ALONE = SETTINGS | {
    "SYNTH_DATA": "1", "SUBMISSION_DIVISION": "open", "LR": "1", "MAX_STEPS": "9", "EVAL_ITER_SAMPLES": "1000",
}  # fmt: skip


def sized(path: Path, blocks: int, more: int = 0) -> None:
    """A sparse file of so many blocks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(blocks * load_module.READ_BYTES + more)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    # Of the tests within this process.
    monkeypatch.setattr(load_module, "QUICK_ROUNDS", 3)


def written_model(folder: Path) -> str:
    (folder / "model.json").write_text(json.dumps(MODEL))
    return str(folder / "model.json")


def start(
    repository: Path, folder: Path, *words: str, **env: str | Path
) -> subprocess.Popen[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environ = kept | SETTINGS | {"LOGDIR": str(folder / "results")}
    environ |= {"BERT_CONFIG": written_model(folder), "CUDA_VISIBLE_DEVICES": ""}
    environ |= {"PYTHON": sys.executable, "RUN_NAME": "test", "BINDING": "none"}
    command, pipe = [repository / "certify.sh", *words], subprocess.PIPE
    settings = {"env": environ | env, "text": True}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, **settings)


def run(
    repository: Path, folder: Path, *words: str, **env: str | Path
) -> subprocess.CompletedProcess[str]:
    process = start(repository, folder, *words, **env)
    out, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def test_a_machine_whose_ranks_agree_passes(repository, tmp_path, quick_python):
    hook = f"cp -t {tmp_path}"
    done = run(repository, tmp_path, PYTHON=quick_python, CERTIFY_HOOK=hook)
    assert done.returncode == 0, done.stdout + done.stderr
    given = json.loads((tmp_path / "certify.json").read_text())
    assert (given["state"], [*given["machines"]]) == ("pass", [platform.node()])
    measured = {figure["name"] for figure in given["figures"]}
    assert {"matmul", "copy", "host_memory", "disk_write"} <= measured
    assert not [*(tmp_path / "results/test").glob(".written*")]
    assert done.stdout.splitlines()[-1] == "pass (software only: the test ran on CPUs)"
    assert "too few to single out" in done.stdout
    (path,) = (tmp_path / "results/test").glob("certify_*.npz")
    record = np.load(path)
    for name in ("data", "compute", "wait", "update"):
        assert (record[f"steps.{name}"] >= 0).all()
    assert record["steps.compute"].min() > 0
    alone = record["steps.stage"] < 2
    for step in np.unique(record["steps.step"][alone]):
        own = alone & (record["steps.step"] == step)
        # The same work for all, and the same seed repeats bit for bit.
        assert {*record["steps.rank"][own].tolist()} == {0, 1}
        assert len({*record["steps.checksum"][own].tolist()}) == 1


def test_a_signal_ends_all_ranks_and_is_reported(repository, tmp_path, quick_python):
    process = start(repository, tmp_path, CERTIFY_SECONDS="300", PYTHON=quick_python)
    ranks = tmp_path / "results" / "test" / "config.json"
    wait_until(ranks.exists)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 143
    assert errors.splitlines()[-1] == "run: error: interrupted by SIGTERM; no verdict"
    assert "Traceback" not in (tmp_path / "results" / "test" / "output.txt").read_text()
    wait_until(lambda: not processes_with(tmp_path), 60)


@pytest.fixture
def load(tmp_path):
    """Creates the load of one rank in this process from environment variables."""

    def make(**settings: str) -> Load:
        environ = ALONE | {"BERT_CONFIG": written_model(tmp_path)} | settings
        trainer = from_env(PretrainingConfig, environ)
        peers = StoreGroup(trainer.dist, HashStore(), "here")
        return Load(from_env(LoadConfig, environ), trainer, peers)

    return make


@pytest.fixture
def alone(tmp_path, load):
    """Runs it; returns the folder with its record."""

    def run_alone(**settings: str) -> Path:
        run_load(load(**settings), tmp_path)
        return tmp_path

    return run_alone


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Runs the program of one rank in this process; returns its exit status."""
    monkeypatch.setattr("certify.__main__.CertifyConfig.store", lambda *_: HashStore())

    def start(**settings: str) -> int:
        environ = ALONE | {"BERT_CONFIG": written_model(tmp_path)}
        environ |= {"RUN_DIR": str(tmp_path), "MASTER_ADDR": "localhost"}
        return main(environ | {"MASTER_PORT": "1"} | settings)

    return start


def test_a_rank_alone_uses_the_cuda_graph_of_a_benchmark_run(alone, monkeypatch):
    taken = []

    class Graph:
        """Stand-in for a recorded step, whose parts are not visible from outside."""

        def __init__(self, step, examples):
            assert sum(one.num_tokens for one in examples) > 0
            self.step = step

        def __call__(self, batches, lr):
            taken.append(len(batches))
            return self.step(batches, lr)

    monkeypatch.setattr(PretrainingConfig, "uses_graph", property(lambda _: True))
    monkeypatch.setattr("bert.training.graph.GraphedStep", Graph)
    folder = alone()
    record = np.load(folder / "certify_here.npz")
    parts = ("compute", "wait", "update")
    compute, wait, update = (record[f"steps.{name}"] for name in parts)
    by_itself = record["steps.stage"] < 2
    assert len(taken) > by_itself.sum() > 0
    assert (compute[by_itself] > 0).all()
    # Medians: one step may have been held up.
    assert np.median((wait + update)[by_itself]) < np.median(compute[by_itself])
    assert (update[~by_itself] > 0).all(), "with others the parts are told apart"
    assert certify(folder).state == "pass"


def test_after_a_failed_capture_the_parts_of_a_step_are_recorded(load, monkeypatch):
    def fail(*_):
        raise CaptureError("out of memory")

    monkeypatch.setattr(PretrainingConfig, "uses_graph", property(lambda _: True))
    monkeypatch.setattr("bert.training.graph.GraphedStep", fail)
    made = load()
    trainee = made.trainee(made.alone)
    made.count_steps(trainee, 3)
    made.take_steps(trainee, 2)
    assert (trainee.recorder.take() > 0).all(), "data, compute, wait and update"


def test_a_flipped_bit_is_reported_with_rank_and_step(alone):
    (found,) = certify(alone(CERTIFY_FLIP="0:3")).corrupt
    assert (found.name, found.stage) == ("rank 0 on here", "parallel")
    assert (found.round, found.step) == (2, 2)
    assert "first in step 3 of round 3" in found.reason().text()


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("CERTIFY_FLIP", ["1", "1:0", "-1:2", "1:2:3"], "RANK:STEP"),
        ("DURATION", ["24", "long", "-1h"], "a number and s, m, h or d"),
    ],
)
def test_a_malformed_drill_or_duration_is_bad_input(name, values, expected):
    for value in values:
        with pytest.raises(ConfigError, match=f"{name}='{value}': expected {expected}"):
            from_env(LoadConfig, SETTINGS | {name: value})


@pytest.mark.parametrize(
    ("drill", "reason"), [("1:1", "ranks are 0 to 0"), ("0:99999", "a round has ")]
)
def test_an_impossible_drill_is_bad_input(program, tmp_path, capsys, drill, reason):
    assert program(CERTIFY_FLIP=drill) == 2
    assert f"CERTIFY_FLIP={drill}: {reason}" in capsys.readouterr().err
    assert not [*tmp_path.glob("certify_*.npz")]


def test_a_drill_beyond_the_steps_of_a_burn_in_is_bad_input(load, tmp_path):
    short = load(CERTIFY_SECONDS="0.0001", CERTIFY_FLIP="0:5")
    with pytest.raises(ConfigError, match="a round has only 4 steps: give an earlier"):
        BurnIn(short, tmp_path, 0.1).run()


def test_a_quick_test_prints_one_line_and_rejects_unknown_options(
    repository, tmp_path, quick_python
):
    settings = {"PYTHON": quick_python, "CERTIFY_HOOK": "false"}
    done = run(repository, tmp_path, "--quick", **settings)
    first, hook = done.stderr.splitlines()
    assert (done.returncode, first) == (0, f"run: Python: {quick_python}")
    assert hook.endswith("CERTIFY_HOOK='false' ended with status 1")
    said, _, left = done.stdout.partition("; not tested: ")
    who = f"2 ranks on 1 node, on CPUs: {platform.node()}"
    assert said == f"pass (software only: the test ran on CPUs): {who}"
    assert "nccl-tests, nvbandwidth, dcgmi diag (not installed, or excluded)" in left
    assert left.count("\n") == 1
    done = run(repository, tmp_path, "--quik")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--quik: expected --quick" in done.stderr


def test_certify_leaves_the_folder_of_a_run_as_it_is(repository, tmp_path):
    folder = tmp_path / "results" / "test"
    folder.mkdir(parents=True)
    files = {".lock": "bert process 7 on n1\n", "error_0.txt": "stopped\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    done = run(repository, tmp_path, "--quick")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.endswith(f"{folder} is of pretraining: choose another name")
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"CERTIFY_SECONDS": "soon"}, "CERTIFY_SECONDS='soon': expected a number above 0"),
        ({"BATCHSIZE": "many"}, "the load did not run: BATCHSIZE='many': expected an integer"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line(repository, tmp_path, quick_python, how, reason):
    done = run(repository, tmp_path, PYTHON=quick_python, **how)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"run: error: {reason}")


def test_a_step_of_the_model_for_cpus_is_short(repository):
    """A round has at least four, and --quick 24 rounds: 2 million parameters, not BERT-large's."""
    small = json.loads((repository / "configs/models/certify_cpus.json").read_text())
    width = small["hidden_size"]
    layers = 12 * width**2 * small["num_hidden_layers"]
    assert layers + width * small["vocab_size"] < 2e6


def test_a_product_in_tf32_leaves_the_setting_as_it_is():
    seen, settings = [], torch.backends.cuda.matmul
    before = settings.allow_tf32

    class Matrix:
        def __matmul__(self, other):
            seen.append(settings.allow_tf32)

    load_module.tf32_product(Matrix(), Matrix())
    assert (seen, settings.allow_tf32) == ([True], before)


def test_one_flipped_bit_changes_the_checksum():
    weights = torch.randn(101, generator=torch.Generator().manual_seed(0))
    other = weights.clone()
    other.view(torch.int32)[17] ^= 1
    assert checksum([weights, weights]) == checksum([weights.clone(), weights])
    assert checksum([weights.to(torch.float64)]) != checksum([other.to(torch.float64)])
    assert checksum([weights, other]) != checksum([weights, weights])
    assert checksum([weights.bfloat16()]) == checksum([weights.bfloat16()])


def lines(folder: Path) -> list[dict]:
    written = (folder / "burn_in_here.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in written]
    assert [line["repeat"] for line in found] == [*range(1, len(found) + 1)]
    return found


def test_a_burn_in_repeats_bit_for_bit_and_resumes(alone):
    folder = alone(DURATION="0.2s")
    first = lines(folder)
    assert not any(line["different"] for line in first)
    assert certify(folder).state == "pass"
    record = (folder / "certify_here.npz").stat().st_mtime_ns
    with (folder / "burn_in_here.jsonl").open("a") as file:
        file.write('{"repeat": 9')  # the power failed
    alone(DURATION=f"{first[-1]['elapsed'] + 0.1}s", CERTIFY_FLIP="0:2")
    again = (folder / "certify_here.npz").stat().st_mtime_ns
    assert again == record, "the stages have run already"
    more = lines(folder)[len(first) :]
    assert more[0]["elapsed"] > first[-1]["elapsed"], "its time goes on"
    assert [line["different"] for line in more] == [{"0": 1}] * len(more)
    found = certify(folder)
    assert found.state == "fail"
    assert f"first in step 2 of repeat {len(first) + 1}" in found.reasons()[0]
    # Whatever its own time allows, a repeat has as many steps as the first.
    alone(DURATION=f"{more[-1]['elapsed'] + 0.1}s", CERTIFY_SECONDS="20")
    assert not lines(folder)[-1]["different"]


def test_what_a_run_starts_from_saves_and_continues_is_nothing_to_its_start_test(
    program, tmp_path
):
    run = {"RESUME": "1", "CHECKPOINT_EVERY_STEPS": "4", "CHECKPOINT_SHARDS": "1"}
    run |= {"INIT_OPTIMIZER": "1", "STEPS_THIS_RUN": "3", "CHECKPOINT_DIR": ""}
    # Without BERT_CONFIG the model is that beside the weights, as in fine-tuning.
    run |= {"BERT_CONFIG": "", "INIT_CHECKPOINT": str(tmp_path / "none.pt")}
    beside = tmp_path / "bert_config.json"
    beside.write_text(json.dumps(MODEL))
    assert program(**run) == 0
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["bert_config"] == str(beside)
    assert described["checkpoint"]["init_checkpoint"] is None


def test_a_burn_in_with_other_settings_is_refused_and_its_files_are_unchanged(
    program, tmp_path, capsys
):
    assert program(DURATION="0.1s") == 0
    kept = {path: path.read_bytes() for path in tmp_path.glob("*.json*")}
    assert program(DURATION="60s", BATCHSIZE="3") == 2
    said = "burn-in that cannot be resumed: BATCHSIZE=2, now 3: choose another RUN_NAME"
    assert said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json*")} == kept


def test_a_burn_in_on_another_machine_or_version_is_refused(tmp_path, load):
    burn_in = BurnIn(load(), tmp_path, 10.0)
    now = {"torch": torch.__version__, "ATTENTION": "sdpa_loop", "hidden_size": 24}
    now |= {"driver": None, "commit": "", "nodes": "here", "ranks": 1}
    for name, value in now.items():
        facts = {"facts": burn_in.facts | {name: "other"}}
        (tmp_path / "burn_in.json").write_text(json.dumps(facts))
        with pytest.raises(ConfigError, match=re.escape(f"{name}=other, now {value}")):
            burn_in.run()
    (tmp_path / "burn_in.json").write_text('{"duration": 1, "checksums": [1]}')
    with pytest.raises(ConfigError, match="ranks is not recorded"):
        burn_in.run()


def test_a_resumed_burn_in_takes_repeats_again_that_a_node_did_not_record(
    tmp_path, load, monkeypatch
):
    burn_in = BurnIn(load(), tmp_path, 10.0)
    (tmp_path / "burn_in.json").write_text('{"checksums": [7]}')
    burn_in.journal.write_text('{"repeat": 5, "elapsed": 9.0}\n')
    assert burn_in._progress() == ([7], 5, 9.0)
    others = [None, [[], 3, 6.0], None]
    monkeypatch.setattr(burn_in.peers, "exchange", lambda own: [own, *others])
    assert burn_in._progress() == ([7], 3, 6.0)


def test_the_memory_of_a_burn_in_does_not_grow(tmp_path, load, monkeypatch):
    held = []
    report = BurnIn._report

    def weigh(self, repeat, *figures):
        report(self, repeat, *figures)
        gc.collect()
        held.append(len(gc.get_objects()))
        self.duration = 0 if repeat == 10 else 1000

    monkeypatch.setattr(BurnIn, "_report", weigh)
    BurnIn(load(CERTIFY_SECONDS="0.01"), tmp_path, 1000).run()
    assert len(held) == 10
    # The least of several, since other threads have objects of a moment.
    assert min(held[7:]) - held[4] < 3, "objects that a repeat leaves behind"


def test_telemetry_of_a_burn_in_is_saved_while_it_runs_and_across_interruptions(
    tmp_path, load, monkeypatch
):
    monkeypatch.setattr("certify.burn_in.SAVE_SECONDS", 0.0)
    burn_in, kept = BurnIn(load(CERTIFY_SECONDS="0.01"), tmp_path, 1000), []
    source = SimpleNamespace(sample=lambda: iter([{"device": 0}]))
    report = BurnIn._report

    def count(self, repeat, *figures):
        kept.append(len(burn_in.sampled()))
        wait_until(lambda: len(sampler.rows()) > kept[-1])
        report(self, repeat, *figures)
        self.duration = 0 if repeat % 2 == 0 else 1000

    monkeypatch.setattr(BurnIn, "_report", count)
    for _ in range(2):
        burn_in.duration = 1000
        sampler = Sampler(source, 0.02, burn_in.sampled())
        sampler.start()
        burn_in.run(sampler)
    kept.append(len(burn_in.sampled()))
    assert kept[0] < kept[1] <= kept[2] < kept[3] <= kept[4], "nothing is lost"
    assert (np.diff(burn_in.sampled()["time"]) > 0).all()
    assert len(Sampler(source, 1.0, burn_in.sampled()).rows()) == kept[-1]


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16])
def test_every_node_meets_a_new_partner_each_round_until_it_has_met_all(nodes):
    rounds = pairings(nodes, 100)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy)) == nodes - nodes % 2
    assert pairings(nodes, 2) == rounds[:2]


def test_the_data_set_is_read_past_the_page_cache_and_no_block_twice(
    tmp_path, load, monkeypatch
):
    # 30 whole blocks, of which a test of three rounds needs 24.
    for name in "ab":
        sized(tmp_path / "data" / "part" / name, 15, more=7)
    flags, read = [], []
    opened, block = os.open, load_module.read_block

    def count(path, how, *more, **at):
        flags.append(how)
        return opened(path, how, *more, **at)

    def note(*where):
        read.append(where)
        return block(*where)

    monkeypatch.setattr(load_module, "read_block", note)
    monkeypatch.setattr(load_module.os, "open", count)
    data = {"DATADIR_PHASE2": str(tmp_path / "data"), "PACKED": "0"}
    made = load(**data)
    made._read_data()
    probes = [(name, number) for _, name, number, *_ in made.probes]
    assert probes == [(b"disk", number) for number in range(3)]
    assert len(read) == len({*read}) == 3 * load_module.READS
    assert flags.count(os.O_RDONLY | os.O_DIRECT) == len(read)
    first = [*read]
    load(**data)._read_data()
    assert read[len(first) :] != first, "another test reads in another order"


@pytest.mark.parametrize(
    ("blocks", "settings", "name", "probes"),
    [
        (30, {"PACKED": "0"}, "DATADIR_PHASE2", 3),
        (30, {"PACKED": "0", "CERTIFY_DISK": "0"}, None, 0),
        (23, {"PACKED": "0"}, "DATADIR_PHASE2", 0),
        (0, {"PACKED": "1"}, "DATADIR_PHASE2_PACKED", 0),
    ],
    ids=["whole", "off", "too small", "packed"],
)
def test_the_data_set_that_is_read_is_that_of_the_config_if_it_is_large_enough(
    tmp_path, load, blocks, settings, name, probes
):
    folders = {"DATADIR_PHASE2": str(tmp_path / "a")}
    folders |= {"DATADIR_PHASE2_PACKED": str(tmp_path / "b")}
    (tmp_path / "b").mkdir()
    sized(tmp_path / "a/file", blocks)
    made = load(**folders, **settings)
    made._read_data()
    assert len(made.probes) == probes
    if name:
        told = {"name": f"{name}={folders[name]}", "blocks": blocks, "needed": 24}
        assert told.items() <= made.data_set.items()


def test_a_read_that_is_cut_off_is_no_measurement(tmp_path):
    (tmp_path / "a").write_bytes(bytes(load_module.READ_BYTES // 2))
    with pytest.raises(OSError, match="cut off at 0 bytes"):
        load_module.read_block(tmp_path / "a", 0)


@pytest.mark.parametrize(
    ("seconds", "rounds"), [("2", 3), ("2.1", 16), ("20", 16), ("40", 32), ("9e9", 64)]
)
def test_more_time_is_more_rounds(seconds, rounds):
    config = from_env(LoadConfig, SETTINGS | {"CERTIFY_SECONDS": seconds})
    assert config.rounds == rounds
