"""Every MLPerf event of a run, in the order of ruleset 5.0.0. The only importer of
mlperf_logging.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from mlperf_logging.mllog import constants, mllog

from common.env import env
from common.files import text_of

RUN_ERROR = "run_error"
_MOST_KEPT = 1 << 20  # lines before the file is opened, more than there are


@dataclass(frozen=True, kw_only=True)
class MlperfConfig:
    """Facts about the submission for the log."""

    division: str = env(
        "SUBMISSION_DIVISION", "closed", "MLPerf division", choices=("closed", "open")
    )
    organization: str = env("SUBMISSION_ORG", "unknown", "submitter")
    platform: str = env(
        "SUBMISSION_PLATFORM",
        "",
        "nodes x system, such as 1xDGXH100; unset: DGXNNODESxDGXSYSTEM",
    )
    status: str = env(
        "SUBMISSION_STATUS",
        "onprem",
        "availability",
        choices=("onprem", "cloud", "preview", "research"),
    )
    system: str = env(
        "DGXSYSTEM", "unknown", "name of the system, as in the config's file name"
    )
    num_nodes: int = env("DGXNNODES", 1, "nodes", at_least=1)
    cache_cleared: bool = env(
        "CACHE_CLEARED",
        False,
        "1: the launcher dropped the page caches before this run",
    )

    @property
    def is_closed(self) -> bool:
        return self.division == "closed"


def _raise(record: logging.LogRecord) -> None:
    error = sys.exc_info()[1]
    assert error is not None
    raise error


def ending_of(path: Path) -> str:
    """Status of a log's run_stop, if its run has ended and not in an error; else empty."""
    status = ""
    for line in text_of(path).splitlines():
        event = json.loads(line.partition(" ")[2]) if line.endswith("}") else {}
        if event.get("key") == constants.RUN_STOP:
            status = str(event["metadata"].get("status"))
        if event.get("key") == RUN_ERROR:
            return ""
    return status


class MlperfLog:
    """Writes MLLOG lines to a file, or without one to stdout; does nothing on ranks other than 0.

    Lines for a file are kept, with their times, until ``open``.

    Sample counts are sequences trained on, the epoch_num of BERT's rules.
    """

    def __init__(
        self, config: MlperfConfig, is_main: bool, path: Path | None = None
    ) -> None:
        self.config = config
        self._event: Callable[..., object] = lambda *_: None
        self._start = self._end = self._event
        self.path, self._is_main, self._has_stopped = path, is_main, False
        self._kept = MemoryHandler(_MOST_KEPT, flushLevel=logging.CRITICAL)
        if is_main:
            # Outside of logging's tree, so that nothing else filters or repeats these lines.
            logger = logging.Logger("mlperf", logging.INFO)
            logger.addHandler(self._kept)
            if path is None:
                self._write_to(logging.StreamHandler(sys.stdout))
            # Names of files in the lines are relative to this folder.
            log = mllog.MLLogger(
                logger, root_dir=str(Path(__file__).resolve().parents[2])
            )
            self._event, self._start, self._end = log.event, log.start, log.end

    def _write_to(self, handler: logging.Handler) -> None:
        self._kept.setTarget(handler)
        self._kept.capacity = 1  # each line at once
        self._kept.flush()

    def open(self) -> None:
        """Begins the file, in the place of an earlier one."""
        if self._is_main and self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(self.path, mode="w", encoding="utf-8")
            setattr(handler, "handleError", _raise)  # noqa: B010 (else a full disk loses lines, and the run goes on)
            self._write_to(handler)

    def init_start(self) -> None:
        """Logs whether the caches were cleared, and the start of initialisation."""
        # Before init_start, by the convention of published logs.
        self._event(constants.CACHE_CLEAR, self.config.cache_cleared)
        self._start(constants.INIT_START)

    def submission(self, hyperparameters: Mapping[str, Any]) -> None:
        """Logs submitter and benchmark, and the run's settings by MLLOG key."""
        config = self.config
        values = {
            constants.SUBMISSION_BENCHMARK: constants.BERT,
            constants.SUBMISSION_ORG: config.organization,
            constants.SUBMISSION_DIVISION: config.division,
            constants.SUBMISSION_STATUS: config.status,
            constants.SUBMISSION_PLATFORM: config.platform
            or f"{config.num_nodes}x{config.system}",
        }
        for key, value in (values | dict(hyperparameters)).items():
            self._event(key, value)

    def weights(self, tensor_names: Iterable[str]) -> None:
        """Logs the initialization of each tensor."""
        # A line for each tensor, as in NVIDIA's logs; the compliance checker does not look.
        for name in tensor_names:
            self._event(constants.WEIGHTS_INITIALIZATION, None, {"tensor": name})

    def run_start(self) -> None:
        """Ends the initialisation and starts the clock."""
        self._end(constants.INIT_STOP)
        self._start(constants.RUN_START)
        # The checker wants an epoch or a block; published logs have both, in this order.
        self._start(constants.EPOCH_START, None, {"epoch_num": 0})
        self._start(
            constants.BLOCK_START, None, {"first_epoch_num": 1, "epoch_count": 1}
        )

    def data(self, max_predictions: int, starting_point: Mapping[str, Any]) -> None:
        """Logs what the open data tell: the most masked tokens of a sequence, and the run's
        starting point.
        """
        self._event("max_predictions_per_seq", max_predictions)
        if starting_point:
            self.note("starting_point", starting_point)

    def eval_start(self, samples: int) -> None:
        """Starts an evaluation after ``samples`` trained samples."""
        self._start(constants.EVAL_START, samples, {"epoch_num": samples})

    def eval_stop(self, samples: int, accuracy: float) -> None:
        self._end(constants.EVAL_STOP, samples, {"epoch_num": samples})
        # From the last epoch_num here the checker takes the samples to convergence.
        self._event(constants.EVAL_ACCURACY, accuracy, {"epoch_num": samples})

    def stats(self, kind: str, values: Mapping[str, Any]) -> None:
        """A metric sink: logs losses, rate and throughput in samples a second of each report."""
        if kind == "train":
            # No ruleset fixes the content of tracked_stats; published logs have the throughput.
            losses = {
                name: value for name, value in values.items() if name.endswith("loss")
            }
            figures = {
                "throughput": values["sequences_per_second"],
                **losses,
                "lr": values["lr"],
            }
            self._event("tracked_stats", figures, {"epoch_num": values["samples"]})

    def run_stop(self, samples: int, eval_samples: int, success: bool) -> None:
        """Logs the numbers of training and evaluation samples and stops the clock: the last line of
        a complete log.
        """
        self._has_stopped = True
        self._end(constants.BLOCK_STOP, None, {"first_epoch_num": 1})
        self._end(constants.EPOCH_STOP, None, {"epoch_num": samples})
        self._event(constants.TRAIN_SAMPLES, samples)
        self._event(constants.EVAL_SAMPLES, eval_samples)
        self._end(
            constants.RUN_STOP,
            samples,
            {"status": constants.SUCCESS if success else constants.ABORTED},
        )

    def failed(self, reason: str) -> None:
        """Logs the error that ends the run, also one after run_stop: then a second run_stop takes
        the first one's success back, for readers that do not know the event of ours.
        """
        self._event(RUN_ERROR, " ".join(reason.split()))
        if self._has_stopped:
            self._end(constants.RUN_STOP, None, {"status": constants.ABORTED})

    def note(self, event: str, value: Any = None, samples: int | None = None) -> None:
        """Logs an event of ours. clock_not_whole: this log's clock leaves out the steps before, and
        the trial has no time; starting_point: weights and data, and which of them are not proved so
        far; batch_left_out: by SKIP_BATCHES; sustained_training_stop: after run_stop, for power
        meters.
        """
        self._event(event, value, None if samples is None else {"epoch_num": samples})
