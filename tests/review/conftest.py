"""A writer of valid BERT logs, which tests then break, and the official tools for comparison."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from review.results import energy

Line = dict[str, Any]
OWN = "/opt/bert/training/mlperf.py"  # that logs, of this repository's trainer
STARTING_POINT = {
    "weights": "ab", "training_data": "cd", "evaluation_data": "ef", "unproved": [],
}  # fmt: skip

HYPERPARAMETERS = {
    "global_batch_size": 768, "gradient_accumulation_steps": 1, "max_sequence_length": 512,
    "max_predictions_per_seq": 76, "opt_base_learning_rate": 0.00096, "opt_lamb_epsilon": 1e-6,
    "opt_lamb_beta_1": 0.60466, "opt_lamb_beta_2": 0.85437, "opt_lamb_weight_decay_rate": 0.1,
    "opt_learning_rate_training_steps": 3680, "opt_learning_rate_warmup_steps": 0, "num_warmup_steps": 0,
    "start_warmup_step": 0,
}  # fmt: skip


PUBLISHED = (  # (samples, accuracy), in the middle of published runs
    (150_000, 0.379), (300_000, 0.403), (450_000, 0.486), (600_000, 0.620), (750_000, 0.692), (900_000, 0.707),
    (1_050_000, 0.7110), (1_200_000, 0.7135), (1_350_000, 0.7149), (1_500_000, 0.7162), (1_650_000, 0.7171),
    (1_800_000, 0.7180), (1_950_000, 0.7186), (2_100_000, 0.7191), (2_250_000, 0.7195), (2_400_000, 0.7198),
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
    initial: float | None = None
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
        self.lines.append(
            {
                "namespace": "",
                "time_ms": int(self._now),
                "event_type": kind,
                "key": key,
                "value": value,
                "metadata": {"file": self.file, "lineno": lineno, **metadata},
            }
        )

    def _header(self) -> None:
        self.log("cache_clear", True)
        self.log("init_start")
        self.log("submission_benchmark", "bert")
        self.log("submission_org", "EXAMPLE")
        self.log("submission_division", self.division)
        self.log("submission_status", "onprem")
        self.log("submission_platform", "1xDGXH100")
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
        if self.initial is not None:
            self._evaluation(0, self.initial, 0.5)
        samples = 0
        for index in range(1, self.evaluations + 1):
            samples = index * self.interval
            share = index / self.evaluations
            noise = 1e-7 * (
                7919 * self.seed % 1009
            )  # no two runs have the same accuracies
            accuracy = (
                self.target
                if index == self.evaluations
                else self._rising(samples, share) + noise
            )
            self._evaluation(samples, accuracy, self.seconds_per_evaluation)
        self.log("block_stop", first_epoch_num=1)
        self.log("epoch_stop", epoch_num=samples)
        self.log("train_samples", samples)
        self.log("eval_samples", 10000)
        self.log("run_stop", status="success")

    def _rising(self, samples: int, share: float) -> float:
        """Accuracies on the way to 0.720 like published runs of batch 768, else on a line."""
        if self.division != "closed" or self.interval != 150_000:
            return 0.38 + 0.33 * share
        reached = [(at, value) for at, value in PUBLISHED if at <= samples]
        return reached[-1][1]

    def _evaluation(self, samples: int, accuracy: float, seconds: float) -> None:
        throughput = self.interval / seconds
        self.log(
            "tracked_stats",
            {"throughput": throughput},
            seconds=seconds,
            epoch_num=samples,
        )
        self.log("eval_start", samples, epoch_num=samples)
        self.log("eval_stop", samples, seconds=0.6, epoch_num=samples)
        self.log("eval_accuracy", accuracy, epoch_num=samples)

    def drop(self, *keys: str) -> LogWriter:
        """Removes every line of these keys."""
        self.lines = [line for line in self.lines if line["key"] not in keys]
        return self

    def change(self, key: str, /, **fields: Any) -> LogWriter:
        """Sets fields of every line of a key."""
        for line in self.lines:
            if line["key"] == key:
                line.update(fields)
        return self

    def text(self, prefix: str = "") -> str:
        """The file's content."""
        return "".join(f"{prefix}:::MLLOG {json.dumps(line)}\n" for line in self.lines)

    def write(self, path: Path, prefix: str = "") -> Path:
        """Writes the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text(prefix), encoding="utf-8")
        return path


@pytest.fixture(scope="session")
def writer() -> type[LogWriter]:
    """The class that writes logs."""
    return LogWriter


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


def write_submission(
    root: Path,
    evaluations: tuple[int, ...] = (17, 18, 17, 16, 17, 14, 13, 16, 16, 17),
    file: str = "train.py",
) -> Path:
    """Writes a valid organisation's tree; returns its folder of results."""
    folder = root / "results" / "dgx" / "bert"
    seeds = random.Random(0)
    for index, count in enumerate(evaluations):
        start = 1_750_000_000_000 + index * 600_000
        LogWriter(
            seed=seeds.randrange(2**31), evaluations=count, start_ms=start, file=file
        ).write(folder / f"result_{index}.txt")
    systems = root / "systems"
    systems.mkdir(parents=True, exist_ok=True)
    (systems / "dgx.json").write_text(json.dumps(SYSTEM), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def make_submission() -> Callable[..., Path]:
    """Writes a valid organisation's tree into a folder; returns its folder of results."""
    return write_submission


@pytest.fixture
def submission(tmp_path: Path) -> Path:
    """The folder of results of a valid organisation's tree."""
    return write_submission(tmp_path / "EXAMPLE")


@pytest.fixture(scope="session")
def official_compliance() -> Callable[[Path, str], bool]:
    """The official checker's verdict on a log; a crash is a failure."""
    import logging

    import yaml
    from mlperf_logging.compliance_checker import mlp_compliance

    def verdict(path: Path, ruleset: str = "5.0.0") -> bool:
        checker = mlp_compliance.make_checker("training", ruleset, False, False)
        mlp_compliance.enqueued_configs.clear()
        loader, yaml.BaseLoader = (
            yaml.BaseLoader,
            getattr(yaml, "CBaseLoader", yaml.BaseLoader),
        )  # same, but faster
        logging.disable(logging.CRITICAL)
        try:
            return mlp_compliance.main(
                str(path), f"training_{ruleset}/common.yaml", checker
            )[0]
        except Exception:
            return False
        finally:
            logging.disable(logging.NOTSET)
            yaml.BaseLoader = loader

    return verdict


@pytest.fixture(scope="session")
def real_folders(shared: Path) -> list[Path]:
    """Published result folders."""
    found = sorted((shared / "real_results").glob("*/results/*/bert"))
    if not found:
        pytest.skip(f"no published results in {shared}")
    return found


def write_power(folder: Path, watts: float = 5000.0) -> None:
    """Writes the power files of every log of a result folder: one node, a reading each second of
    the run.
    """
    for path in folder.glob("result_*.txt"):
        events = [
            json.loads(line.split(":::MLLOG ")[1])
            for line in path.read_text().splitlines()
        ]
        start, stop = (
            next(e["time_ms"] for e in events if e["key"] == key)
            for key in ("run_start", "run_stop")
        )
        samples = path.parent / f"samples_{path.stem}"
        samples.mkdir()
        number = int(path.stem.removeprefix("result_"))
        rows = [
            f"{time},{watts + number}"
            for time in range(start - 2000, stop + 2001, 1000)
        ]
        (samples / "node.csv").write_text(
            "\n".join(["time_ms,watts_ipmi", *rows]) + "\n"
        )
        energy.write(samples, path, folder / "power" / path.stem, 1.0)
        shutil.rmtree(samples)


@pytest.fixture(scope="session")
def power_files() -> Callable[[Path], None]:
    """Writes the power files of every log of a folder."""
    return write_power
