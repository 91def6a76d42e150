"""NVIDIA's own tests of bandwidth and health, where they are installed: nccl-tests, nvbandwidth, ``dcgmi diag``.

They run before the load, on the first rank of each node, and over all nodes by CERTIFY_MPI. What they measure becomes
rows of the table ``probes``, their versions and faults a part of ``about``; what they print stays in
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

from bert.core.env import ConfigError, env
from certify.meeting import Meeting
from certify.schema import ALL_NODES, COLLECTIVES, COPIES, DIAGNOSTIC, NOBODY, NVBANDWIDTH

ROUNDS = 3  # of each test of bandwidth, to know how well it repeats
SIZES = ("-b", "1K", "-e", "1G", "-f", "2")  # of a collective
KNOWN = (DIAGNOSTIC, NVBANDWIDTH, *COLLECTIVES, *(name + ALL_NODES for name in COLLECTIVES))


class ToolError(Exception):
    """A tool that has measured nothing, and why."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which tools run, and how."""

    tools: str = env("CERTIFY_TOOLS", "", doc="programs; `none`; unset: on GPUs those found")
    seconds: float = env("CERTIFY_TOOL_SECONDS", 600.0, above=0, doc="seconds after which such a tool has failed")
    mpi: str = env(
        "CERTIFY_MPI", "", doc="starts nccl-tests on each GPU of all nodes: `srun --overlap --mpi=pmix -n 16`"
    )
    level: int = env(
        "CERTIFY_DCGM_LEVEL", 2, at_least=1, at_most=4, doc="of `dcgmi diag`: 1 takes seconds, 3 half an hour"
    )

    def programs(self, on_gpus: bool) -> dict[str, str]:
        """Path of each tool by name. Raises ConfigError for one that is asked for and cannot run."""
        if not self.tools:
            return {name: path for name in KNOWN if on_gpus and (path := shutil.which(name))}
        found = {}
        for word in self.tools.split() if self.tools != "none" else ():
            name, path = Path(word).name, shutil.which(word)
            if name not in KNOWN:
                raise ConfigError(f"CERTIFY_TOOLS: {word}: expected `none` or some of {', '.join(KNOWN)}")
            if path is None:
                raise ConfigError(f"CERTIFY_TOOLS: {word} is not installed here: give its path, or leave it out")
            if name.endswith(ALL_NODES) and not self.mpi:
                raise ConfigError(f"CERTIFY_TOOLS: {word} needs CERTIFY_MPI, the command that starts it on all nodes")
            found[name] = path
        return found

    def commands(self, programs: Mapping[str, str], gpus: int) -> Iterator[tuple[str, list[str]]]:
        """(name of the test, command) of a node with so many GPUs; those over all nodes end in ALL_NODES."""
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
    """What a tool has found.

    rates: (test, GPU, other GPU or NOBODY, bytes, GB/s); faults: (of which device or "", state, what); skipped: tests
    that it did not do.
    """

    version: str
    rates: list[tuple[str, int, int, float, float]] = field(default_factory=list)
    faults: list[tuple[str, str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def run(
    config: Config, programs: Mapping[str, str], meeting: Meeting, folder: Path, environ: Mapping[str, str]
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Rows of ``probes`` and, for ``about``, name, version, faults and skipped tests of each tool; by this rank.

    Every rank calls it and waits. programs: the same on all nodes.
    """
    members = meeting.members(meeting.node)
    commands = dict(config.commands(programs, len(members)))
    patience = meeting.config.timeout_seconds + ROUNDS * config.seconds * len(commands)
    meeting.store.set_timeout(datetime.timedelta(seconds=patience))
    rows: list[tuple[Any, ...]] = []
    told: list[dict[str, Any]] = []
    for over_all in (False, True):
        ranks = range(meeting.size) if over_all else members
        # Whatever was said to the rank as one of a job would make a tool take itself for a rank, too.
        foreign = ("PMI", "OMPI_") if over_all else ("PMI", "OMPI_", "SLURM_")
        own = {name: value for name, value in environ.items() if not name.startswith(foreign)}
        for name, command in commands.items():
            if name.endswith(ALL_NODES) == over_all and meeting.rank == ranks[0]:
                path = folder / f"tools_{meeting.nodes[meeting.node]}" / name
                about, rates = test(name, command, len(ranks), path, config.seconds, own)
                told.append(about)
                for number, what, gpu, peer, amount, rate in rates:
                    if gpu < len(ranks):
                        rows.append((ranks[gpu], what.encode(), number, peer, amount / rate / 1e9, amount))
        meeting.barrier()
    meeting.store.set_timeout(datetime.timedelta(seconds=meeting.config.timeout_seconds))
    return rows, told


def test(
    name: str, command: Sequence[str], ranks: int, path: Path, seconds: float, environ: Mapping[str, str]
) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Name, version, faults and skipped tests of a tool, and its rates, each with its round in front."""
    about: dict[str, Any] = {"name": name, "version": "", "faults": [], "skipped": []}
    rates: list[tuple[Any, ...]] = []
    for number in range(1 if name == DIAGNOSTIC else ROUNDS):
        try:
            found = read(name, *execute(command, path.with_name(f"{name}_{number}.txt"), seconds, environ), ranks)
        except ToolError as error:
            about["faults"].append(("", "fail", str(error)))
            break
        about |= {"version": found.version, "skipped": found.skipped}
        about["faults"] += [one for one in found.faults if one not in about["faults"]]
        rates += [(number, *rate) for rate in found.rates]
    return about, rates


def execute(command: Sequence[str], path: Path, seconds: float, environ: Mapping[str, str]) -> tuple[int, str]:
    """Exit status and output of a tool, which goes to ``path``. Raises ToolError if it does not start, or not end."""
    path.parent.mkdir(exist_ok=True)
    errors = path.with_suffix(".err")
    with open(path, "wb") as out, open(errors, "wb") as err:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(environ), start_new_session=True
            )
        except OSError as error:
            raise ToolError(f"did not start: {error.strerror}") from None
        with contextlib.suppress(OSError):  # the rank is bound to the CPUs beside its GPU
            os.sched_setaffinity(process.pid, range(os.cpu_count() or 1))
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ToolError(f"did not end in CERTIFY_TOOL_SECONDS={seconds:g}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, "\n".join(one.read_text(encoding="utf-8", errors="replace") for one in (path, errors))


def read(name: str, status: int, text: str, ranks: int) -> Reading:
    """What a tool has printed. ranks: that a collective must have had. Raises ToolError."""
    lines = [line.strip() for line in text.splitlines() if re.search("error|fail|invalid|unable|cannot", line, re.I)]
    ended = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    try:
        if name == DIAGNOSTIC:
            found = read_dcgmi(text)
        else:
            found = read_nvbandwidth(text) if name == NVBANDWIDTH else read_nccl_tests(name, text, ranks)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        short = "its output is cut short or of an unknown form"
        raise ToolError(": ".join([ended if status else short, *lines[-1:]])) from None
    if status and all(state != "fail" for _, state, _ in found.faults):
        raise ToolError(": ".join([ended, *lines[-1:]]))
    return found


def read_nccl_tests(name: str, text: str, ranks: int) -> Reading:
    """The table of sizes; out of place, of which a row ends with time, algbw, busbw, #wrong, and the same in place."""
    version = re.search(r"nccl-tests version (\S+)(?:.*nccl-library=(\d+))?", text)
    wrong = int(re.findall(r"Out of bounds values *: *(\d+)", text)[-1])  # among its last lines
    took_part = len({*re.findall(r"^# +Rank +(\d+)", text, re.M)})
    if took_part != ranks:
        raise ToolError(f"had {took_part} ranks, not {ranks}: for several processes build it with MPI=1")
    found = Reading(version[1] if version else "")
    if version and version[2]:
        code = int(version[2])
        found.version += f" with NCCL {code // 10000}.{code // 100 % 100}.{code % 100}"
    for line in text.splitlines():
        words = line.split()
        if len(words) > 10 and words[0].isdigit() and (rate := float(words[-6])) > 0:  # small ones round to 0
            found.rates.append((name, 0, NOBODY, float(words[0]), rate))
    if not found.rates:
        raise ToolError("measured no bandwidth")
    if wrong:
        found.faults.append(("", "fail", f"{wrong:,} wrong values in its results"))
    return found


def read_nvbandwidth(text: str) -> Reading:
    """Of ``-j``. Its exit status is 0 though a test case failed; one that the machine cannot do is waived."""
    told = _document(text)["nvbandwidth"]
    if error := told.get("error"):
        raise ToolError(" ".join(str(error).split()))
    found = Reading(str(told["version"]))
    cases = {case["name"]: case for case in told["testcases"]}
    for name in COPIES:
        case = cases.get(name, {"status": "Not Found"})
        if case["status"] == "Waived":
            found.skipped.append(name)
        elif case["status"] != "Passed":
            words = " ".join(str(case.get("error", "")).split())
            found.faults.append(("", "fail", f"{name}: {': '.join(filter(None, (case['status'], words)))}"))
        else:
            between = name.startswith("device_to_device")
            for row, cells in enumerate(case["bandwidth_matrix"]):
                for column, cell in enumerate(cells):
                    gpu, peer = (row, column) if between else (column, NOBODY)
                    if cell != "N/A" and (rate := float(cell)) > 0:  # of a GPU with itself there is none
                        found.rates.append((name, gpu, peer, 1e9, rate))
    return found


def read_dcgmi(text: str) -> Reading:
    """Of ``diag -j``, of DCGM 4 and 3. A test that passes may have warnings all the same."""
    document = _document(text)
    told = document.get("DCGM Diagnostic") or document["DCGM GPU Diagnostic"]
    if error := told.get("runtime_error"):
        raise ToolError(" ".join(str(error).split()))
    found = Reading(str(document.get("metadata", document).get("version") or told.get("version") or ""))
    for test in (test for category in told["test_categories"] for test in category["tests"]):
        name, results, summary = test["name"], test.get("results", []), test.get("test_summary", {})
        faults = [fault for result in results if (fault := _fault(name, result))]
        found.faults += faults or ([fault] if summary and (fault := _fault(name, summary)) else [])  # it repeats theirs
        if all(str(result.get("status")).lower() == "skip" for result in results or [summary]):
            found.skipped.append(name)
    return found


def _fault(name: str, result: dict[str, Any]) -> tuple[str, str, str] | None:
    """(of which device, state, what) of a result of ``dcgmi diag``."""
    state, told = str(result.get("status")).lower(), result.get("warnings", [])
    said = [one if isinstance(one, str) else one.get("warning") or one.get("warnings") for one in told]
    if state in ("pass", "skip") and not said:
        return None
    who = f"GPU {result['gpu_id']}" if "gpu_id" in result else ""
    if "entity_group" in result:
        who = f"{result['entity_group']} {result['entity_id']}"
    words = " ".join("; ".join(filter(None, said)).split())
    return who, "fail" if state == "fail" else "warn", f"{name}: {words or state}"


def _document(text: str) -> dict[str, Any]:
    """The JSON document in a tool's output, which may have other lines around it. Raises ValueError."""
    return json.JSONDecoder().raw_decode(text, text.index("{"))[0]
