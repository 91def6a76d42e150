"""A writer of valid BERT logs, which tests then break, and the official tools for comparison."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.rcp_checker import rcp_checker
from mlperf_logging.result_summarizer import result_summarizer

from review.__main__ import main
from review.results import energy
from review.rulebook import official

Line = dict[str, Any]
# Of hypothesis: folders are used again, a busy machine is slow.
UNTIMED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}
OWN = "/opt/bert/training/mlperf.py"  # that logs, of this repository's trainer
STARTING_POINT = {
    "weights": "ab", "training_data": "cd", "evaluation_data": "ef", "unproved": [],
}  # fmt: skip

SUBMISSION = {
    "benchmark": "bert", "org": "EXAMPLE", "division": "", "status": "onprem", "platform": "1xDGXH100",
}  # fmt: skip
HYPERPARAMETERS = {
    "global_batch_size": 768, "gradient_accumulation_steps": 1, "max_sequence_length": 512,
    "max_predictions_per_seq": 76, "opt_base_learning_rate": 0.00096, "opt_lamb_epsilon": 1e-6,
    "opt_lamb_beta_1": 0.60466, "opt_lamb_beta_2": 0.85437, "opt_lamb_weight_decay_rate": 0.1,
    "opt_learning_rate_training_steps": 3680, "opt_learning_rate_warmup_steps": 0, "num_warmup_steps": 0,
    "start_warmup_step": 0,
}  # fmt: skip


PUBLISHED = (  # each 150,000 samples, in the middle of published runs
    0.379, 0.403, 0.486, 0.620, 0.692, 0.707, 0.7110, 0.7135, 0.7149, 0.7162, 0.7171, 0.7180, 0.7186, 0.7191,
    0.7195, 0.7198,
)  # fmt: skip


@dataclass
class LogWriter:
    """The lines of one run; change ``lines`` before ``text`` is taken."""

    seed: int = 1
    evaluations: int = 17
    interval: int = 150_000
    start_ms: int = 1_750_000_000_000
    seconds_per_evaluation: float = 12.5
    division: str = "closed"
    target: float = 0.7203
    file: str = "train.py"
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._now = float(self.start_ms)
        self._header()
        self._training()

    def log(
        self,
        key: str,
        value: Any = None,
        *,
        lineno: int = 1,
        seconds: float = 0.001,
        **metadata: Any,
    ) -> None:
        """Appends an event ``seconds`` after the last one."""
        self._now += 1000 * seconds
        kind = "INTERVAL_START" if key.endswith("start") else "POINT_IN_TIME"
        line = {"namespace": "", "time_ms": int(self._now), "event_type": kind}
        about = {"file": self.file, "lineno": lineno, **metadata}
        self.lines.append(line | {"key": key, "value": value, "metadata": about})

    def _header(self) -> None:
        self.log("cache_clear", True)
        self.log("init_start")
        for key, value in (SUBMISSION | {"division": self.division}).items():
            self.log(f"submission_{key}", value)
        self.log("seed", self.seed, lineno=7)
        for key, value in HYPERPARAMETERS.items():
            self.log(key, value)
        self.log("weights_initialization", tensor="bert/embeddings/word_embeddings")
        self.log("init_stop", seconds=15)
        self.log("run_start")
        if self.file == OWN and self.division == "closed":
            self.log("starting_point", STARTING_POINT)

    def _training(self) -> None:
        self.log("epoch_start", epoch_num=0)
        self.log("block_start", first_epoch_num=1, epoch_count=1)
        samples = 0
        for index in range(1, self.evaluations + 1):
            samples = index * self.interval
            # No two runs have the same accuracies.
            noise = 1e-7 * (7919 * self.seed % 1009)
            accuracy = self._rising(index) + noise
            if index == self.evaluations:
                accuracy = self.target
            self._evaluation(samples, accuracy, self.seconds_per_evaluation)
        self.log("block_stop", first_epoch_num=1)
        self.log("epoch_stop", epoch_num=samples)
        self.log("train_samples", samples)
        self.log("eval_samples", 10000)
        self.log("run_stop", status="success")

    def _rising(self, index: int) -> float:
        """Accuracies on the way to 0.720 like published runs of batch 768, else on a line."""
        if self.division != "closed" or self.interval != 150_000:
            return 0.38 + 0.33 * index / self.evaluations
        return PUBLISHED[min(index, len(PUBLISHED)) - 1]

    def _evaluation(self, samples: int, accuracy: float, seconds: float) -> None:
        speed = {"throughput": self.interval / seconds}
        self.log("tracked_stats", speed, seconds=seconds, epoch_num=samples)
        self.log("eval_start", samples, epoch_num=samples)
        self.log("eval_stop", samples, seconds=0.6, epoch_num=samples)
        self.log("eval_accuracy", accuracy, epoch_num=samples)

    def drop(self, *keys: str) -> LogWriter:
        self.lines = [line for line in self.lines if line["key"] not in keys]
        return self

    def change(self, key: str, /, **fields: Any) -> LogWriter:
        for line in self.lines:
            if line["key"] == key:
                line.update(fields)
        return self

    def text(self, prefix: str = "") -> str:
        return "".join(f"{prefix}:::MLLOG {json.dumps(line)}\n" for line in self.lines)

    def write(self, path: Path, prefix: str = "") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text(prefix), encoding="utf-8")
        return path


SYSTEM_BLANKS = [
    "host_processor_vcpu_count", "host_processor_frequency", "host_processor_caches", "host_processor_interconnect",
    "accelerator_frequency", "accelerator_on-chip_memories", "hw_notes", "sw_notes",
]  # fmt: skip
SYSTEM = {
    "submitter": "EXAMPLE", "division": "closed", "status": "Available on-premise", "system_name": "DGX",
    "number_of_nodes": "1", "host_processors_per_node": "2", "host_processor_model_name": "Xeon",
    "host_processor_core_count": "56", "host_memory_capacity": "2 TB", "host_storage_type": "NVMe SSD",
    "host_storage_capacity": "28 TB", "host_networking": "8x InfiniBand NDR", "host_networking_topology": "fat tree",
    "host_memory_configuration": "32x 64 GB", "accelerators_per_node": "8", "accelerator_model_name": "H100",
    "accelerator_host_interconnect": "PCIe 5", "accelerator_memory_configuration": "HBM3",
    "accelerator_memory_capacity": "80 GB", "accelerator_interconnect": "NVLink",
    "accelerator_interconnect_topology": "switch", "cooling": "air", "framework": "PyTorch",
    "other_software_stack": "CUDA 12", "operating_system": "Ubuntu 24.04", "host_network_card_count": "8",
    "system_type": "datacenter", **dict.fromkeys(SYSTEM_BLANKS, ""),
}  # fmt: skip


def git(folder: Path, *words: str) -> str:
    """Runs git with a test identity."""
    identity = "-c user.name=test -c user.email=t@example.com -c commit.gpgsign=false"
    command = ["git", "-C", str(folder), *identity.split(), *words]
    return subprocess.check_output(command, text=True).strip()


class Said(NamedTuple):
    """What a command ends with, and prints."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """command(word, ...) runs ``python -m review`` with these words."""

    def run(*words: object) -> Said:
        capsys.readouterr()
        status = main([*map(str, words)])
        return Said(status, *capsys.readouterr())

    return run


def write_runs(
    folder: Path, counts: Iterable[int] = (17,) * 10, **options: Any
) -> Path:
    """Writes a log with each number of evaluations; returns the folder."""
    for seed, count in enumerate(counts):
        log = LogWriter(seed=seed, evaluations=count, **options)
        log.write(folder / f"result_{seed}.txt")
    return folder


@lru_cache
def _text(seed: int, evaluations: int, start_ms: int, file: str) -> str:
    return LogWriter(seed, evaluations, start_ms=start_ms, file=file).text()


COUNTS = (17, 18, 17, 16, 17, 14, 13, 16, 16, 17)  # evaluations of the runs


def write_submission(root: Path, file: str = "train.py") -> Path:
    """Writes a valid organisation's tree; returns its folder of results."""
    folder, seeds = root / "results" / "dgx" / "bert", random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for index, count in enumerate(COUNTS):
        start = 1_750_000_000_000 + index * 600_000
        text = _text(seeds.randrange(2**31), count, start, file)
        (folder / f"result_{index}.txt").write_text(text)
    systems = root / "systems"
    systems.mkdir(parents=True, exist_ok=True)
    (systems / "dgx.json").write_text(json.dumps(SYSTEM), encoding="utf-8")
    return folder


@pytest.fixture
def submission(tmp_path: Path) -> Path:
    """The folder of results of a valid organisation's tree."""
    return write_submission(tmp_path / "EXAMPLE")


@contextlib.contextmanager
def quiet_tools() -> Iterator[None]:
    """The official tools called here log nothing, and run faster as in the package, to the same effect."""
    import yaml

    mlp_compliance.enqueued_configs.clear()
    logging.disable(logging.CRITICAL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            fast = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
            patch.setattr(yaml, "BaseLoader", fast)
            patch.setattr(re, "sub", official.substitute)
            yield
    finally:
        logging.disable(logging.NOTSET)


def official_compliance(path: Path, ruleset: str = "5.0.0") -> bool:
    """The official checker's verdict on a log; a crash is a failure."""
    checker = mlp_compliance.make_checker("training", ruleset, False, False)
    rules = f"training_{ruleset}/common.yaml"
    with quiet_tools(), contextlib.suppress(Exception):
        return mlp_compliance.main(str(path), rules, checker)[0]
    return False


def official_rcp(folder: Path, train_samples: bool = False) -> tuple[bool, str, float]:
    """(passed, reason, scaling factor) of the official checker."""
    options = (str(folder), "training", "5.0.0", False, train_samples)
    with quiet_tools():
        return rcp_checker.check_directory(*options, rcp_pass="pruned_rcps")


def official_score(folder: Path, has_power: bool = False) -> tuple[float, float]:
    """(minutes, joules) of the official summarizer."""
    with quiet_tools(), contextlib.redirect_stdout(io.StringIO()):
        return result_summarizer._compute_strong_score_standalone(
            "bert", "x", has_power, str(folder), "training", "5.0.0"
        )[:2]


def _content(root: Path) -> tuple[Any, ...]:
    """What there is below a folder: names, kinds, contents; of absolute links what they lead to."""
    return tuple(
        (str(path.relative_to(root)), path.lstat().st_mode, path.exists())
        + ((path.read_bytes(),) if path.is_file() else _led_to(path))
        for path in sorted(root.rglob("*"))
    )


def _led_to(path: Path) -> tuple[Any, ...]:
    target = os.readlink(path) if path.is_symlink() else ""
    return _content(Path(target)) if os.path.isabs(target) else (target,)


@pytest.fixture(scope="session", autouse=True)
def asked_once() -> Iterator[None]:
    """The package checker, a process of its own, is asked once about the same content: nearly all
    commands ask it, and it takes most of their time. What it writes is written each time.
    """
    answers: dict[Any, tuple[str, official.Outcome, dict[Path, bytes]]] = {}
    ask = official.check_package

    def check(root: Path, *options: Any) -> official.Outcome:
        content = hash((root.name, _content(root), *options))
        if content not in answers:
            outcome = ask(root, *options)
            files = [path for path in root.rglob("scaling.json") if path.is_file()]
            written = {path.relative_to(root): path.read_bytes() for path in files}
            answers[content] = str(root), outcome, written
        asked, found, written = answers[content]
        for name, data in written.items():
            (root / name).write_bytes(data)
        texts = [one.replace(asked, str(root)) for one in found.messages]
        crash = found.crash and found.crash.replace(asked, str(root))
        return replace(found, messages=tuple(texts), crash=crash)

    least, known = rcp_checker.RCP_Checker._find_min_acceptable_mean, {}

    def of_reference(self: Any, *numbers: float) -> float:
        if (key := (self.submission_runs, *numbers)) not in known:
            known[key] = least(self, *numbers)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rcp_checker.RCP_Checker, least.__name__, of_reference)
        # Which the processes of the package checker inherit.
        rcp_checker.RCP_Checker("training", "5.0.0", "bert", False)
        patch.setattr(official, "check_package", check)
        yield


@pytest.fixture(scope="session")
def real_folders(shared: Path) -> list[Path]:
    found = sorted((shared / "real_results").glob("*/results/*/bert"))
    if not found:
        pytest.skip(f"no published results in {shared}")
    return found


def events_of(path: Path) -> list[Line]:
    lines = [line for line in path.read_text().splitlines() if ":::MLLOG " in line]
    return [json.loads(line.split(":::MLLOG ")[1]) for line in lines]


def span_of(path: Path) -> tuple[int, int]:
    """Times of run_start and run_stop, in milliseconds."""
    times = {event["key"]: event["time_ms"] for event in reversed(events_of(path))}
    return times["run_start"], times["run_stop"]


def write_power(folder: Path, watts: float = 5000.0) -> None:
    """Writes the power files of every log of a result folder: one node, a reading each second of the run."""
    for path in folder.glob("result_*.txt"):
        start, stop = span_of(path)
        samples = path.parent / f"samples_{path.stem}"
        samples.mkdir()
        drawn = watts + int(path.stem.removeprefix("result_"))
        rows = [f"{time},{drawn}\n" for time in range(start - 2000, stop + 2001, 1000)]
        text = "".join(["time_ms,watts_ipmi\n", *rows])
        (samples / "node.csv").write_text(text)
        energy.write(samples, path, folder / "power" / path.stem, 1.0)
        shutil.rmtree(samples)
