"""NVIDIA's tests of bandwidth and health, where installed: nccl-tests, nvbandwidth, ``dcgmi diag``.

They run before the load, on the first rank of each node, and over all nodes through CERTIFY_MPI. Their measurements
become rows of the table ``probes``, their versions and faults entries of ``about``; their output stays in
RUN_DIR/tools_<node>.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from certify.meeting import Meeting
from common.env import ConfigError, env
from review.acceptance.schema import ALL_NODES, COLLECTIVES, COPIES, DIAGNOSTIC, NOBODY, NVBANDWIDTH

ROUNDS = 3  # of each bandwidth test, to know how well it repeats
SIZES = ("-b", "1K", "-e", "1G", "-f", "2")  # message sizes of a collective
KNOWN = (DIAGNOSTIC, NVBANDWIDTH, *COLLECTIVES, *(name + ALL_NODES for name in COLLECTIVES))


class ToolError(Exception):
    """A tool measured nothing; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tools to run, and their options."""

    tools: str = env(
        "CERTIFY_TOOLS", "", doc="programs to run, or `none`; unset: those installed, on GPUs"
    )
    seconds: float = env(
        "CERTIFY_TOOL_SECONDS", 600.0, above=0, doc="time limit of each tool, seconds"
    )
    mpi: str = env(
        "CERTIFY_MPI", "", doc="launches nccl-tests on all GPUs: `srun --overlap --mpi=pmix -n 16`"
    )
    level: int = env(
        "CERTIFY_DCGM_LEVEL",
        2,
        at_least=1,
        at_most=4,
        doc="`dcgmi diag -r`: 1: seconds, 3: half an hour",
    )

    def programs(self, on_gpus: bool) -> dict[str, str]:
        """Path of each tool by name. Raises ConfigError for a requested tool that cannot run."""
        if not self.tools:
            return {name: path for name in KNOWN if on_gpus and (path := shutil.which(name))}
        found = {}
        for word in self.tools.split() if self.tools != "none" else ():
            name, path = Path(word).name, shutil.which(word)
            if name not in KNOWN:
                raise ConfigError(
                    f"CERTIFY_TOOLS: {word}: expected `none` or some of {', '.join(KNOWN)}"
                )
            if path is None:
                raise ConfigError(
                    f"CERTIFY_TOOLS: {word} is not installed: give its path, or remove it"
                )
            if name.endswith(ALL_NODES) and not self.mpi:
                raise ConfigError(
                    f"CERTIFY_TOOLS: {word} needs CERTIFY_MPI, the command that launches it on all nodes"
                )
            found[name] = path
        return found

    def commands(self, programs: Mapping[str, str], gpus: int) -> Iterator[tuple[str, list[str]]]:
        """(test name, command) for a node with ``gpus`` GPUs; names of tests over all nodes end in ALL_NODES."""
        for name, path in programs.items():
            if name == DIAGNOSTIC:
                yield name, [path, "diag", "-j", "-r", str(self.level)]
            elif name == NVBANDWIDTH:
                yield name, [path, "-j", "-t", *COPIES]
            else:
                test = name.removesuffix(ALL_NODES)
                if name == test and gpus > 1:
                    yield test, [path, *SIZES, "-g", str(gpus)]
                if self.mpi and (name != test or test + ALL_NODES not in programs):
                    yield test + ALL_NODES, [*shlex.split(self.mpi), path, *SIZES, "-g", "1"]


@dataclass
class Reading:
    """Results of a tool.

    rates: (test, GPU, other GPU or NOBODY, bytes, GB/s); faults: (device or "", state, message); skipped: tests.
    """

    version: str
    rates: list[tuple[str, int, int, float, float]] = field(default_factory=list)
    faults: list[tuple[str, str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def run(
    config: Config,
    programs: Mapping[str, str],
    meeting: Meeting,
    folder: Path,
    environ: Mapping[str, str],
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Runs the tools that this rank is responsible for. A collective. programs: the same on all nodes.

    Returns rows of ``probes``, and for ``about`` the name, version, faults and skipped tests of each tool.
    """
    commands = dict(config.commands(programs, len(meeting.node_ranks)))
    patience = meeting.config.timeout_seconds + ROUNDS * config.seconds * len(commands)
    meeting.store.set_timeout(datetime.timedelta(seconds=patience))
    rows: list[tuple[Any, ...]] = []
    reports: list[dict[str, Any]] = []
    for over_all in (False, True):
        ranks = range(meeting.size) if over_all else meeting.node_ranks
        # With the launcher's variables of this rank, a tool would take itself for a rank of the job.
        foreign = ("PMI", "OMPI_") if over_all else ("PMI", "OMPI_", "SLURM_")
        own = {name: value for name, value in environ.items() if not name.startswith(foreign)}
        for name, command in commands.items():
            if name.endswith(ALL_NODES) == over_all and meeting.rank == ranks[0]:
                path = folder / f"tools_{meeting.nodes[meeting.node]}" / name
                about, rates = test(name, command, len(ranks), path, config.seconds, own)
                reports.append(about)
                for number, what, gpu, peer, amount, rate in rates:
                    if gpu < len(ranks):
                        rows.append(
                            (ranks[gpu], what.encode(), number, peer, amount / rate / 1e9, amount)
                        )
        meeting.barrier()
    meeting.store.set_timeout(datetime.timedelta(seconds=meeting.config.timeout_seconds))
    return rows, reports


def test(
    name: str,
    command: Sequence[str],
    ranks: int,
    path: Path,
    seconds: float,
    environ: Mapping[str, str],
) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Runs a tool's rounds; its name, version, faults and skipped tests, and (round, *rate) of each of its rates."""
    about: dict[str, Any] = {"name": name, "version": "", "faults": [], "skipped": []}
    rates: list[tuple[Any, ...]] = []
    for number in range(1 if name == DIAGNOSTIC else ROUNDS):
        try:
            found = read(
                name,
                *execute(command, path.with_name(f"{name}_{number}.txt"), seconds, environ),
                ranks,
            )
        except ToolError as error:
            about["faults"].append(("", "fail", str(error)))
            break
        about |= {"version": found.version, "skipped": found.skipped}
        about["faults"] += [one for one in found.faults if one not in about["faults"]]
        rates += [(number, *rate) for rate in found.rates]
    return about, rates


def execute(
    command: Sequence[str], path: Path, seconds: float, environ: Mapping[str, str]
) -> tuple[int, str]:
    """Exit status and output of a tool; the output also goes to ``path``. Raises ToolError, on a timeout too."""
    path.parent.mkdir(exist_ok=True)
    errors = path.with_suffix(".err")
    with open(path, "wb") as out, open(errors, "wb") as err:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            raise ToolError(f"did not start: {error.strerror}") from None
        with contextlib.suppress(OSError):  # undo the rank's CPU binding
            os.sched_setaffinity(process.pid, range(os.cpu_count() or 1))
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ToolError(f"did not end in CERTIFY_TOOL_SECONDS={seconds:g}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, "\n".join(
        one.read_text(encoding="utf-8", errors="replace") for one in (path, errors)
    )


def read(name: str, status: int, text: str, ranks: int) -> Reading:
    """Parses a tool's output. ranks: the number that a collective must have had. Raises ToolError."""
    lines = [
        line.strip()
        for line in text.splitlines()
        if re.search("error|fail|invalid|unable|cannot", line, re.I)
    ]
    ended = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    try:
        if name == DIAGNOSTIC:
            found = read_dcgmi(text)
        else:
            found = (
                read_nvbandwidth(text)
                if name == NVBANDWIDTH
                else read_nccl_tests(name, text, ranks)
            )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        short = "its output is truncated or has an unknown format"
        raise ToolError(": ".join([ended if status else short, *lines[-1:]])) from None
    if status and all(state != "fail" for _, state, _ in found.faults):
        raise ToolError(": ".join([ended, *lines[-1:]]))
    return found


def read_nccl_tests(name: str, text: str, ranks: int) -> Reading:
    """Out-of-place bus bandwidths by size. A row ends with time, algbw, busbw, #wrong, and the same four in place."""
    version = re.search(r"nccl-tests version (\S+)(?:.*nccl-library=(\d+))?", text)
    wrong = int(re.findall(r"Out of bounds values *: *(\d+)", text)[-1])
    took_part = len({*re.findall(r"^# +Rank +(\d+)", text, re.M)})
    if took_part != ranks:
        raise ToolError(
            f"had {took_part} ranks instead of {ranks}: for several processes, build it with MPI=1"
        )
    found = Reading(version[1] if version else "")
    if version and version[2]:
        code = int(version[2])
        found.version += f" with NCCL {code // 10000}.{code // 100 % 100}.{code % 100}"
    for words in map(str.split, text.splitlines()):
        if (
            len(words) > 10 and words[0].isdigit() and (rate := float(words[-6])) > 0
        ):  # small rates round to 0
            found.rates.append((name, 0, NOBODY, float(words[0]), rate))
    if not found.rates:
        raise ToolError("measured no bandwidth")
    if wrong:
        found.faults.append(("", "fail", f"{wrong:,} wrong values in its results"))
    return found


def read_nvbandwidth(text: str) -> Reading:
    """Parses ``-j``. The exit status is 0 even if a test case failed; one that the machine cannot run is waived."""
    report = _document(text)["nvbandwidth"]
    if error := report.get("error"):
        raise ToolError(" ".join(str(error).split()))
    found = Reading(str(report["version"]))
    cases = {case["name"]: case for case in report["testcases"]}
    for name in COPIES:
        case = cases.get(name, {"status": "Not Found"})
        if case["status"] == "Waived":
            found.skipped.append(name)
        elif case["status"] != "Passed":
            words = " ".join(str(case.get("error", "")).split())
            found.faults.append(
                ("", "fail", f"{name}: {': '.join(filter(None, (case['status'], words)))}")
            )
        else:
            for row, cells in enumerate(case["bandwidth_matrix"]):
                for column, cell in enumerate(cells):
                    gpu, peer = (
                        (row, column) if name.startswith("device_to_device") else (column, NOBODY)
                    )
                    if cell != "N/A" and (rate := float(cell)) > 0:  # N/A: a GPU with itself
                        found.rates.append((name, gpu, peer, 1e9, rate))
    return found


def read_dcgmi(text: str) -> Reading:
    """Parses ``diag -j`` of DCGM 4 and 3. A test that passes may still have warnings."""
    document = _document(text)
    report = document.get("DCGM Diagnostic") or document["DCGM GPU Diagnostic"]
    if error := report.get("runtime_error"):
        raise ToolError(" ".join(str(error).split()))
    found = Reading(
        str(document.get("metadata", document).get("version") or report.get("version") or "")
    )
    for test in (test for category in report["test_categories"] for test in category["tests"]):
        name, results, summary = test["name"], test.get("results", []), test.get("test_summary", {})
        faults = [fault for result in results if (fault := _fault(name, result))]
        # The summary repeats the faults of the results.
        found.faults += faults or ([fault] if summary and (fault := _fault(name, summary)) else [])
        if all(str(result.get("status")).lower() == "skip" for result in results or [summary]):
            found.skipped.append(name)
    return found


def _fault(name: str, result: dict[str, Any]) -> tuple[str, str, str] | None:
    """(device, state, message) of a result of ``dcgmi diag``; None if it passed without a warning."""
    state, listed = str(result.get("status")).lower(), result.get("warnings", [])
    warnings = [
        one if isinstance(one, str) else one.get("warning") or one.get("warnings") for one in listed
    ]
    if state in ("pass", "skip") and not warnings:
        return None
    device = f"GPU {result['gpu_id']}" if "gpu_id" in result else ""
    if "entity_group" in result:
        device = f"{result['entity_group']} {result['entity_id']}"
    words = " ".join("; ".join(filter(None, warnings)).split())
    return device, "fail" if state == "fail" else "warn", f"{name}: {words or state}"


def _document(text: str) -> dict[str, Any]:
    """The JSON document in a tool's output, among other lines. Raises ValueError."""
    return json.JSONDecoder().raw_decode(text, text.index("{"))[0]
