"""Schema of a test's record, written by the load and read by the verdict. Imports no torch.

certify_<node>.npz holds the tables ``steps``, ``probes`` and ``telemetry`` of a node, one array per
column, and ``about``: JSON on the node and its ranks. burn_in_<node>.npz holds the telemetry of a
burn-in in the same format.
"""

import difflib
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.env import ConfigError, env
from common.files import whole_file
from common.tables import read_table

Columns = dict[str, np.ndarray]
# By device (NODE, GPU 0, mlx5_0/1, eth0), then by name.
Facts = dict[str, dict[str, Any]]
NODE = "node"
XID = r"NVRM: Xid \(([^)]*)\): (\d+)"  # a GPU's error in the kernel log: bus address, number
UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile)
VERSION = 3
TABLES = read_table(__file__, "tables.yaml")
STAGES, PROBES, REDUCTIONS = TABLES["stages"], TABLES["probes"], TABLES["reductions"]
COLLECTIVES, COPIES = TABLES["collectives"], TABLES["copies"]
ALONE = ("single", "parallel")
ALL_NODES = "_mpi"  # suffix of a collective's name: over all nodes
NCCL_TESTS, NVBANDWIDTH, DIAGNOSTIC = "nccl-tests", "nvbandwidth", "dcgmi"
TOOLS = (
    {name: f"{label} of each node, nccl-tests" for name, label in COLLECTIVES.items()}
    | {
        name + ALL_NODES: f"{label} of all ranks, nccl-tests"
        for name, label in COLLECTIVES.items()
    }
    | COPIES
)
BURN_IN = "burn-in"
# Unit of each rate that a config may expect.
UNITS = {"parallel": "sequences/s", "together": "sequences/s"}
UNITS |= {
    name: "Tflop/s" if name.startswith("matmul") else "GB/s"
    for name in (*PROBES, "reduce_together", *TOOLS)
}
LABELS = STAGES | PROBES | TOOLS | REDUCTIONS | {BURN_IN: "burn-in"}
PARTS = ("data", "compute", "wait", "update")  # of a step
NOBODY = -1  # partner of a node without one

# One row per step. partner: number of the other node of a pair; cpu: CPU seconds of the rank's
# process; sequences: in its batches; checksum: of the weights after the step.
STEP = np.dtype(
    [
        ("rank", np.int32),
        ("stage", np.int8),
        ("round", np.int16),
        ("partner", np.int16),
        ("step", np.int32),
        *((part, np.float32) for part in PARTS),
        ("cpu", np.float32),
        ("sequences", np.int32),
        ("checksum", np.int64),
    ]
)
# One row per measurement: a matrix product, a copy, a read, an all-reduce, or one of TOOLS, which
# is entered for its GPU's rank or the first of its node. partner: number of the other node or GPU;
# amount: operations or bytes.
PROBE = np.dtype(
    [
        ("rank", np.int32),
        ("probe", "S32"),
        ("round", np.int16),
        ("partner", np.int16),
        ("seconds", np.float64),
        ("amount", np.float64),
    ]
)
FIELDS = tuple(TABLES["fields"])  # of a sample
# One row per second and GPU. device: local rank. throttle: NVML's bit mask of reasons; exact in a
# float64.
SAMPLE = np.dtype(
    [
        ("time", np.float64),
        ("device", np.int16),
        *((name, np.float64) for name in FIELDS),
    ]
)


@dataclass(frozen=True)
class RankInfo:
    """Node, GPU number and device name of a rank."""

    rank: int
    local_rank: int
    node: str
    device: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.node}"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Figures that a healthy system reaches, set by a config."""

    text: str = env(
        "EXPECTED_FIGURES",
        "",
        doc="rates of a good machine: `parallel=90 copy=2900`, by --expect",
    )

    def figures(self) -> dict[str, float]:
        """Expected figures by name. Raises ConfigError."""
        figures: dict[str, float] = {}
        for word in self.text.replace(",", " ").split():
            name, _, value = word.partition("=")
            if name not in UNITS:
                near = difflib.get_close_matches(name, UNITS, n=1)
                hint = (
                    f"did you mean {near[0]}?"
                    if near
                    else f"expected one of {', '.join(UNITS)}"
                )
                raise ConfigError(
                    f"EXPECTED_FIGURES: {word}: no figure is called {name!r}: {hint}"
                )
            # Neither nan nor infinity, which float() reads too.
            if not re.fullmatch(r"\d+(\.\d+)?", value) or not float(value):
                raise ConfigError(
                    f"EXPECTED_FIGURES: {word}: expected {name}= a number above 0"
                )
            figures[name] = float(value)
        return figures


def write(
    path: Path, about: Mapping[str, Any], tables: Mapping[str, np.ndarray]
) -> None:
    """Writes a file atomically. about: the node and its ranks; tables: structured arrays by
    name.
    """
    columns: dict[str, Any] = {
        f"{name}.{column}": rows[column]
        for name, rows in tables.items()
        for column in rows.dtype.names or ()
    }
    # An open file, since savez adds .npz to a name without it.
    with whole_file(path) as partial, open(partial, "wb") as file:
        # JSON as text: np.load does not read pickled objects by default, and should not.
        np.savez_compressed(
            file, about=np.array(json.dumps({"version": VERSION, **about})), **columns
        )


def read(path: Path) -> tuple[dict[str, Any], dict[str, Columns]]:
    """Returns ``about`` and the columns of each table. Raises one of UNREADABLE."""
    tables: dict[str, Columns] = {}
    with np.load(path) as file:
        about: dict[str, Any] = json.loads(str(file["about"]))
        for name in file.files:
            # ``about`` is the one name without a dot.
            table, _, column = name.partition(".")
            if column:
                tables.setdefault(table, {})[column] = file[name]
    return about, tables
