"""What the logs and files of one folder say of all its runs, before any rule is asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from review.logs import tree
from review.logs.mllog import number, text
from review.logs.output import counted
from review.results.benchmark import target_of
from review.results.run import TARGET_ACCURACY, Run
from review.rulebook import rcp
from review.rulebook.compliance import BENCHMARK, DEFAULT_RULESET


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The runs of one folder. None or empty: not known.

    ``crashes``: trials without a result; ``errors``: by log, the error that ended its run;
    ``unreadable``: files. ``division``: of the system description, as for the official checkers,
    else of the first log. ``target``: 0.720, or of open runs that of config.json. ``pretrains``: the
    runs had no target, by config.json: they are for weights, not for a score. ``batch_size``: None if
    the logs differ. ``processes``: of runs without accelerators. ``train_samples``: use these in the
    RCP test instead of the last epoch_num, as the rules allow for BERT.
    """

    folder: Path
    runs: tuple[Run, ...] = ()
    crashes: dict[int, str] = field(default_factory=dict)
    errors: dict[Path, str] = field(default_factory=dict)
    unreadable: dict[Path, str] = field(default_factory=dict)
    ruleset: str = DEFAULT_RULESET
    train_samples: bool = False
    name: str = ""
    division: str | None = None
    organization: str | None = None
    platform: str | None = None
    other_benchmark: str = ""
    target: float = TARGET_ACCURACY
    pretrains: bool = False
    batch_size: float | None = None
    accelerator: str = ""
    accelerators: int | None = None
    processes: int | None = None
    rcp_point: rcp.Rcp | None = None

    @property
    def subtitle(self) -> str:
        """Submitter, platform, division, batch size and accelerators, as far as known."""
        size = "" if self.batch_size is None else f"batch {self.batch_size:g}"
        ranks = counted(self.processes, "process") if self.processes else ""
        if self.accelerators:
            ranks = counted(self.accelerators, "accelerator")
        known = (self.organization, self.platform, self.division, size, ranks)
        return ", ".join(filter(None, known))

    @property
    def rcp_tested(self) -> bool:
        return self.division == "closed" and rcp.has_points(self.ruleset)


def run_folder(
    folder: Path,
    runs: Sequence[Run],
    ruleset: str = DEFAULT_RULESET,
    train_samples: bool = False,
    **found: Any,
) -> RunFolder:
    """What logs and files say together. ``found``: crashes, errors and unreadable."""

    def first(key: str) -> str | None:
        values = (run.log.value(key) for run in runs)
        return next((text(value) for value in values if value not in (None, "")), None)

    described = tree.description(folder).get("division")
    known = described in ("closed", "open")
    division = described if known else first("submission_division")
    sizes = {run.batch_size for run in runs}
    batch_size = next(iter(sizes)) if len(sizes) == 1 else None
    # Some trainers log init_start on every rank, so that the most in a log is the number of ranks.
    starts = max((len(run.log.all("init_start")) for run in runs), default=0)
    ranks, on_gpus = tree.count_ranks(folder)
    settings = tree.read_json(folder / "config.json", "evaluate")
    resolved = folder.resolve()
    made = RunFolder(
        folder=folder,
        runs=tuple(runs),
        ruleset=ruleset,
        train_samples=train_samples,
        name=resolved.parent.name if tree.system_file(folder) else resolved.name,
        division=division,
        organization=first("submission_org"),
        platform=first("submission_platform"),
        other_benchmark=_other_benchmark(runs),
        target=_target(settings, division, ruleset),
        pretrains=_pretrains(settings),
        batch_size=batch_size,
        accelerator=_accelerator(folder),
        accelerators=tree.count_accelerators(folder, starts),
        processes=None if on_gpus else ranks,
        **found,
    )
    if batch_size is None or not made.rcp_tested:
        return made
    return replace(made, rcp_point=rcp.find(batch_size, ruleset)[0])


def _other_benchmark(runs: Sequence[Run]) -> str:
    """The logged benchmarks if none is BERT; empty for BERT, or if none is logged."""
    logged = [run.log.value("submission_benchmark") for run in runs]
    named = {text(value) for value in logged if value}
    # One log of BERT is enough: in a mixed folder the others are what is wrong, and are reported.
    return "" if BENCHMARK in named else ", ".join(sorted(named))


def _accelerator(folder: Path) -> str:
    """Name of the accelerator, or of the processor of a system without one."""
    described = tree.description(folder)
    name = text(described.get("accelerator_model_name") or "").strip()
    if name and name.casefold() not in ("n/a", "none", "-"):
        return name
    gpus = tree.read_json(folder / "environment.json").get("gpus")
    if isinstance(gpus, list) and gpus:
        first = gpus[0]
        return text(first.get("name", "") if isinstance(first, dict) else first)
    return text(described.get("host_processor_model_name") or "").strip()


def _target(settings: dict[str, Any], division: str | None, ruleset: str) -> float:
    # A closed run has the target of the rules, whatever its config.json says.
    target = number(settings.get("target")) if division == "open" else None
    return target_of(ruleset) if target is None or not 0 < target < 1 else target


def _pretrains(settings: dict[str, Any]) -> bool:
    # Logs of others come without config.json; they are taken for what they say, runs to a target.
    if "target" not in settings:
        return False
    # A target without any evaluation can never be reached: that, too, is a run for weights.
    return not (settings["target"] and settings.get("every_samples", True))
