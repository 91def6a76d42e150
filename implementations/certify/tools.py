"""NVIDIA's tests of bandwidth and health, where installed: nccl-tests, nvbandwidth, ``dcgmi diag``.

They run before the load, on the first rank of each node, and over all nodes through CERTIFY_MPI.
Their measurements become rows of the table ``probes``, their versions and faults entries of
``about``; their output stays in RUN_DIR/tools_<node>.
"""

import contextlib
import datetime
import json
import math
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

from certify.store_group import StoreGroup
from common.env import ConfigError, env
from common.process import one_line
from review.acceptance.schema import (
    ALL_NODES,
    COPIES,
    DIAGNOSTIC,
    NOBODY,
    NVBANDWIDTH,
    TOOLS,
)

ROUNDS = 3  # of each bandwidth test, to know how well it repeats
# Level of `dcgmi diag -r` and the time limit of a tool's round: it takes a few minutes, at level 3
# half an hour.
BRIEF, THOROUGH = (2, 600.0), (3, 3600.0)
SIZES = ("-b", "1K", "-e", "1G", "-f", "2")  # message sizes of a collective
NUM_SIZES, LARGEST = 21, 1 << 30  # what SIZES asks for
SURE_SIZE = 1 << 20  # from here on a printed bandwidth of 0.00 is no rounding
SETTING = 5  # DCGM_ERROR_CONFIG of dcgm_errors.h: a setting such as persistence mode, no broken part
KNOWN = (DIAGNOSTIC, NVBANDWIDTH, *(name for name in TOOLS if name not in COPIES))


class ToolError(Exception):
    """A tool measured nothing; the message says why."""


@dataclass(frozen=True, kw_only=True)
class ToolsConfig:
    """Tools to run, and their options."""

    tools: str = env(
        "CERTIFY_TOOLS",
        "",
        doc="programs to run, or `none`; unset: those installed, on GPUs",
    )
    mpi: str = env(
        "CERTIFY_MPI",
        "",
        doc="launches nccl-tests on all GPUs: `srun --overlap --mpi=pmix -n 16`",
    )

    def programs(self, on_gpus: bool) -> dict[str, str]:
        """Path of each tool by name. Raises ConfigError for a requested tool that cannot run."""
        # Unasked, a missing tool is no fault; asked for by name, it is.
        if not self.tools:
            return {
                name: path for name in KNOWN if on_gpus and (path := shutil.which(name))
            }
        programs = {}
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
            programs[name] = path
        return programs

    def commands(
        self, programs: Mapping[str, str], gpus: int, level: int
    ) -> Iterator[tuple[str, list[str]]]:
        """(test name, command) for a node with ``gpus`` GPUs; names of tests over all nodes end in
        ALL_NODES.
        """
        for name, path in programs.items():
            if name == DIAGNOSTIC:
                yield name, [path, "diag", "-j", "-r", str(level)]
            elif name == NVBANDWIDTH:
                yield name, [path, "-j", "-t", *COPIES]
            else:
                test = name.removesuffix(ALL_NODES)
                # A collective of one GPU moves nothing.
                if name == test and gpus > 1:
                    yield test, [path, *SIZES, "-g", str(gpus)]
                # The program of that name, built with MPI, has precedence over the plain one.
                if self.mpi and (name != test or test + ALL_NODES not in programs):
                    yield (
                        test + ALL_NODES,
                        [*shlex.split(self.mpi), path, *SIZES, "-g", "1"],
                    )


@dataclass
class Reading:
    """Results of a tool.

    rates: (test, GPU, other GPU or NOBODY, bytes, GB/s); faults: (device or "", state, message);
    skipped: tests; gpus: that a diagnosis names.
    """

    version: str
    rates: list[tuple[str, int, int, float, float]] = field(default_factory=list)
    faults: list[tuple[str, str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    gpus: set[str] = field(default_factory=set)

    def fail(self, message: str, device: str = "") -> None:
        self.faults.append((device, "fail", message))


def run(
    config: ToolsConfig,
    programs: Mapping[str, str],
    peers: StoreGroup,
    folder: Path,
    environ: Mapping[str, str],
    thorough: bool = False,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Runs the tools that this rank is responsible for. A collective. programs: the same on all
    nodes.

    Returns rows of ``probes``, and for ``about`` the name, version, faults and skipped tests of
    each tool.
    """
    level, limit = THOROUGH if thorough else BRIEF
    commands = dict(config.commands(programs, len(peers.node_ranks), level))
    # Meanwhile the other ranks wait in the store, longer than its usual limit allows, and for nodes
    # that have more programs than their own.
    own = peers.config.timeout_seconds + ROUNDS * limit * len(commands)
    patience = peers.max(own)
    peers.store.set_timeout(datetime.timedelta(seconds=patience))
    rows: list[tuple[Any, ...]] = []
    reports: list[dict[str, Any]] = []
    # One after the other: a test of a node would take bandwidth from one over all nodes.
    for over_all in (False, True):
        ranks = range(peers.size) if over_all else peers.node_ranks
        # With the launcher's variables of this rank, a tool would take itself for a rank of the
        # job.
        foreign = ("PMI", "OMPI_") if over_all else ("PMI", "OMPI_", "SLURM_")
        of_node = {
            name: value
            for name, value in environ.items()
            if not name.startswith(foreign)
        }
        for name, command in commands.items():
            if name.endswith(ALL_NODES) == over_all and peers.rank == ranks[0]:
                outputs = folder / f"tools_{peers.nodes[peers.node]}"
                about, rates = test(name, command, len(ranks), outputs, limit, of_node)
                reports.append(about)
                for number, measured, gpu, peer, amount, rate in rates:
                    # Tools see every GPU of the node, also those that the job has no rank for.
                    if gpu < len(ranks):
                        rows.append(
                            (
                                ranks[gpu],
                                measured.encode(),
                                number,
                                peer,
                                amount / rate / 1e9,
                                amount,
                            )
                        )
        peers.barrier()
    peers.store.set_timeout(datetime.timedelta(seconds=peers.config.timeout_seconds))
    return rows, reports


def test(
    name: str,
    command: Sequence[str],
    ranks: int,
    folder: Path,
    seconds: float,
    environ: Mapping[str, str],
) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Runs a tool's rounds; its name, version, faults and skipped tests, and (round, *rate) of each
    of its rates.
    """
    about: dict[str, Any] = {"name": name, "version": "", "faults": [], "skipped": []}
    rates: list[tuple[Any, ...]] = []
    # A diagnosis is a verdict, not a rate with noise.
    for number in range(1 if name == DIAGNOSTIC else ROUNDS):
        try:
            output = folder / f"{name}_{number}.txt"
            status, text = execute(command, output, seconds, environ)
            reading = read(name, status, text, ranks)
        except ToolError as error:
            about["faults"].append(("", "fail", str(error)))
            break
        about |= {"version": reading.version, "skipped": reading.skipped}
        about["faults"] += [
            fault for fault in reading.faults if fault not in about["faults"]
        ]
        rates += [(number, *rate) for rate in reading.rates]
    return about, rates


def execute(
    command: Sequence[str], path: Path, seconds: float, environ: Mapping[str, str]
) -> tuple[int, str]:
    """Exit status and output of a tool; the output also goes to ``path``. Raises ToolError, on a
    timeout too.
    """
    path.parent.mkdir(exist_ok=True)
    errors = path.with_suffix(".err")
    with open(path, "wb") as out, open(errors, "wb") as err:
        try:
            # Into files, not pipes: what a tool printed before it hung is kept.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(environ),
                # A process group of its own, to kill it with its children.
                start_new_session=True,
            )
        except OSError as error:
            raise ToolError(f"did not start: {error.strerror}") from None
        with contextlib.suppress(OSError):  # undo the rank's CPU binding
            os.sched_setaffinity(process.pid, range(os.cpu_count() or 1))
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ToolError(f"did not end in {seconds:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                # Also after a normal end: a child that is left would disturb the load.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, "\n".join(
        file.read_text(encoding="utf-8", errors="replace") for file in (path, errors)
    )


def read(name: str, status: int, text: str, ranks: int) -> Reading:
    """Parses a tool's output. ranks: the GPUs that must have taken part. Raises ToolError.

    Whatever was asked for and is absent, zero, not a number or cut off is a fault: it was not seen
    to be good.
    """
    lines = [
        line.strip()
        for line in text.splitlines()
        if re.search("error|fail|invalid|unable|cannot", line, re.I)
    ]
    ended = (
        f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    )
    try:
        if name == DIAGNOSTIC:
            reading = read_dcgmi(text)
        elif name == NVBANDWIDTH:
            reading = read_nvbandwidth(text, ranks)
        else:
            reading = read_nccl_tests(name, text, ranks)
    # RecursionError is json's answer to brackets nested thousands deep.
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        short = "its output is truncated or has an unknown format"
        raise ToolError(": ".join([ended if status else short, *lines[-1:]])) from None
    failed = any(state == "fail" for _, state, _ in reading.faults)
    # dcgmi's status is not 0 for a setting either; a status that stands for a signal never is one.
    of_setting = name == DIAGNOSTIC and bool(reading.faults) and status > 160
    if status and not failed and not of_setting:
        raise ToolError(": ".join([ended, *lines[-1:]]))
    if name == DIAGNOSTIC and len(reading.gpus) < ranks:
        reading.fail(f"tested {len(reading.gpus)} of {ranks} GPUs")
    return reading


def is_positive(value: float) -> bool:
    """Whether a measurement is one: above 0 and finite, not nan."""
    return 0 < value < math.inf


def read_nccl_tests(name: str, text: str, ranks: int) -> Reading:
    """Out-of-place bus bandwidths by size; those in place are only checked.

    A row has size, count, type and, by version, redop and root, then time (us), algbw, busbw (GB/s)
    and #wrong out of place, and the same four in place, N/A where a collective has none; until 2021
    the largest error stood for #wrong, whose verdict is the last line. Small bandwidths are
    printed as 0.00 and are taken from the time, with the factor from algorithm to bus bandwidth
    that the largest size shows.
    """
    version = re.search(r"nccl-tests version (\S+)(?:.*nccl-library=(\d+))?", text)
    # Printed after the table: where the output was cut off, this raises IndexError.
    count, verdict = re.findall(r"Out of bounds values *: *(\d+) *(\w*)", text)[-1]
    took_part = len({*re.findall(r"^# +Rank +(\d+)", text, re.M)})
    if took_part != ranks:
        raise ToolError(
            f"had {took_part} ranks instead of {ranks}: for several processes, build it with MPI=1"
        )
    reading = Reading(version[1] if version else "")
    if version and version[2]:
        code = int(version[2])
        reading.version += (
            f" with NCCL {code // 10000}.{code // 100 % 100}.{code % 100}"
        )
    rows = [
        columns
        for columns in map(str.split, text.splitlines())
        if columns and columns[0].isdigit()
    ]
    # A row that was cut off must not count as a size with fewer columns.
    if len({*map(len, rows)}) != 1 or not 11 <= len(rows[0]) <= 13:
        raise ValueError(name)
    rows = [[*columns[:2], *columns[-8:]] for columns in rows]
    in_place = [columns for columns in rows if columns[6] != "N/A"]
    checked = [columns[5] for columns in rows if columns[5] != "N/A"]
    if not checked:
        reading.skipped.append(f"sums of {name}")
    checked += [columns[9] for columns in in_place if columns[9] != "N/A"]
    counted = re.search("^# +size .*#wrong", text, re.M)
    wrong = max(map(int, [count, *(checked if counted else ())]))
    table = [(int(columns[0]), *map(float, columns[2:5])) for columns in rows]
    if not any(is_positive(bus) for *_, bus in table):
        raise ToolError("measured no bandwidth")
    largest, _, algorithm, bus = max(table)
    # Sizes are rounded down to multiples of the ranks: the smallest may be 0 elements.
    empty = [columns for columns in rows if columns[:2] == ["0", "0"]]
    measured = len({size for size, *_ in table if size}) + len(empty)
    if measured < NUM_SIZES or largest < 0.9 * LARGEST:
        reading.fail(
            f"measured {measured} of {NUM_SIZES} sizes, the largest {largest:,} bytes"
        )
    factor = bus / algorithm if is_positive(algorithm) else math.nan
    table += [(int(columns[0]), *map(float, columns[6:9])) for columns in in_place]
    for number, (size, microseconds, _, rate) in enumerate(table):
        # `not >=` is true of nan too.
        if not rate >= 1 and size < SURE_SIZE:  # too few digits
            rate = size / microseconds / 1e3 * factor if microseconds else math.nan
        where = "" if number < len(rows) else " in place"
        if size and not is_positive(rate):
            reading.fail(f"{rate:g} GB/s at {size:,} bytes{where}")
        elif size and not where:
            reading.rates.append((name, 0, NOBODY, float(size), rate))
    if wrong:
        reading.fail(f"{wrong:,} wrong values in its results")
    elif verdict != "OK":
        reading.fail(f"its values: {verdict or 'no verdict'}")
    return reading


def read_nvbandwidth(text: str, gpus: int) -> Reading:
    """Parses ``-j``. The exit status is 0 even if a test case failed; one that the machine cannot
    run is waived.
    """
    report = _document(text)["nvbandwidth"]
    if error := report.get("error"):
        raise ToolError(one_line(error))
    reading = Reading(str(report["version"]))
    if warning := report.get("warning"):
        reading.faults.append(("", "warn", one_line(warning)))
    cases = {case["name"]: case for case in report["testcases"]}
    # By the names asked for, so that a test that is missing in the report is a fault.
    for name in COPIES:
        case = cases.get(name, {"status": "Not Found"})
        status = case["status"]
        if status == "Waived":
            # One GPU has no other to copy from.
            if gpus > 1 or not name.startswith("device_to_device"):
                reading.skipped.append(name)
        elif status != "Passed":
            why = one_line(case.get("error", ""))
            reading.fail(f"{name}: {': '.join(filter(None, (str(status), why)))}")
        else:
            _read_matrix(reading, name, case["bandwidth_matrix"], gpus)
    return reading


def _read_matrix(
    reading: Reading, name: str, matrix: Sequence[Sequence[Any]], gpus: int
) -> None:
    """Adds GB/s of one row (from or to the host), or of each pair; N/A belongs to a GPU with itself
    only.
    """
    in_pairs = name.startswith("device_to_device")
    columns = min((len(cells) for cells in matrix), default=0)
    seen = min(columns, len(matrix)) if in_pairs else columns
    if seen < gpus:
        reading.fail(f"{name}: measured {seen} of {gpus} GPUs")
    for row, cells in enumerate(matrix):
        for column, cell in enumerate(cells):
            if in_pairs and row == column:
                continue
            gpu, peer = (row, column) if in_pairs else (column, NOBODY)
            rate = math.nan if cell == "N/A" else float(cell)
            if is_positive(rate):
                # nvbandwidth prints rates only; of 1e9 nominal bytes they become seconds.
                reading.rates.append((name, gpu, peer, 1e9, rate))
            else:
                who = f"GPU {gpu} from GPU {peer}" if in_pairs else f"GPU {gpu}"
                reading.fail(f"{name}: {who}: {cell} GB/s", f"GPU {gpu}")


def read_dcgmi(text: str) -> Reading:
    """Parses ``diag -j`` of DCGM 4 and 3. A test that passes may still have warnings."""
    document = _document(text)
    report = document.get("DCGM Diagnostic") or document["DCGM GPU Diagnostic"]
    if error := report.get("runtime_error"):
        raise ToolError(one_line(error))
    reading = Reading(
        str(
            document.get("metadata", document).get("version")
            or report.get("version")
            or ""
        )
    )
    tests = [
        test for category in report["test_categories"] for test in category["tests"]
    ]
    for test in tests:
        reading.gpus |= _gpus(_results(test))
    for test in tests:
        _read_diagnosis(reading, test)
    # Also where there is none.
    if {str(test["name"]) for test in tests} <= {*reading.skipped}:
        raise ToolError("ran no test")
    return reading


def _read_diagnosis(reading: Reading, test: Mapping[str, Any]) -> None:
    """Adds the faults of one test: those of its results, and of its summary where that says
    more; and the GPUs that other tests name and this one leaves out.
    """
    name, summary = str(test["name"]), test.get("test_summary")
    results = _results(test)
    # Some tests have only a summary.
    given = results or ([summary] if summary else [])
    if not given:
        reading.fail(f"{name}: no result")
        return
    skipped = [result for result in given if _status(result) in ("skip", "not run")]
    if len(skipped) == len(given):
        reading.skipped.append(name)
    else:
        reading.skipped += [
            f"{name} of {_device(entry) or 'a GPU'}" for entry in skipped
        ]
    failed = [result for result in results if _fault(name, result)]
    gpus = _gpus(results)
    # A test of the whole system names no GPU, or only one to complain of it.
    if gpus and len(failed) < len(results):
        reading.skipped += [f"{name} of {gpu}" for gpu in sorted(reading.gpus - gpus)]
    faults = [fault for result in failed if (fault := _fault(name, result))]
    reading.faults += faults
    if summary and (fault := _fault(name, summary)):
        known = {warning for result in failed for warning in _warnings(result)}
        of_settings = bool(failed) and all(map(_is_setting, failed))
        # The summary of a test repeats its results; that of a setting lacks the severity.
        repeated = any(state in ("fail", fault[1]) for _, state, _ in faults) or (
            of_settings
            and _status(summary) == "fail"
            and {*_warnings(summary)} <= known
        )
        if not repeated:
            reading.faults.append(fault)


def _results(test: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Without the null that DCGM 3 writes for a GPU on which the test did not run."""
    return [result for result in test.get("results", []) if result]


def _gpus(results: Sequence[Mapping[str, Any]]) -> set[str]:
    return {
        device for result in results if (device := _device(result)).startswith("GPU")
    }


def _warnings(result: Mapping[str, Any]) -> list[str]:
    listed = result.get("warnings", [])
    texts = [
        warning
        if isinstance(warning, str)
        else warning.get("warning") or warning.get("warnings")
        for warning in listed
    ]
    return [one_line(text) for text in texts if text]


def _status(result: Mapping[str, Any]) -> str:
    return str(result.get("status")).lower().replace("_", " ")


def _device(result: Mapping[str, Any]) -> str:
    if "entity_group" in result:
        return f"{result['entity_group']} {result['entity_id']}"
    return f"GPU {result['gpu_id']}" if "gpu_id" in result else ""


def _is_setting(result: Mapping[str, Any]) -> bool:
    """Whether all that a result complains of can be set: no part is broken."""
    warnings = result.get("warnings", [])
    return bool(warnings) and all(
        isinstance(warning, dict) and warning.get("error_severity") == SETTING
        for warning in warnings
    )


def _fault(name: str, result: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """(device, state, message) of a result of ``dcgmi diag``; None if it passed without a
    warning.
    """
    status, warnings = _status(result), _warnings(result)
    if status in ("pass", "skip", "not run") and not result.get("warnings"):
        return None
    # A status that is not known here fails.
    known_good = status in ("pass", "skip", "not run", "warn") or _is_setting(result)
    message = f"{name}: {'; '.join(warnings) or status}"
    return _device(result), "warn" if known_good else "fail", message


def _document(text: str) -> dict[str, Any]:
    """The JSON document in a tool's output, among other lines. Raises ValueError."""
    return json.JSONDecoder().raw_decode(text, text.index("{"))[0]
