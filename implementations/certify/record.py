"""certify_<node>.npz: what the ranks of a node have measured, an array a column; certify.records reads it.

burn_in_<node>.npz is the telemetry of a burn-in, in the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert.core.files import whole_file
from certify.recorder import PARTS

VERSION = 3
STAGES = ("single", "parallel", "node", "pairs", "together")
# One row a step. partner: the number of the other node of a pair, or -1; sequences: trained on; cpu: seconds that the
# rank's process used of CPUs; checksum: of the weights after the step.
STEP = np.dtype(
    [
        *(("rank", np.int32), ("stage", np.int8), ("round", np.int16), ("partner", np.int16), ("step", np.int32)),
        *((part, np.float32) for part in PARTS),
        *(("cpu", np.float32), ("sequences", np.int32)),
        ("checksum", np.int64),
    ]
)
# One row a measurement: a matrix product, a copy, a read, an all-reduce. amount: operations or bytes of one.
PROBE = np.dtype(
    [
        *(("rank", np.int32), ("probe", "S16"), ("round", np.int16), ("partner", np.int16)),
        *(("seconds", np.float64), ("amount", np.float64)),
    ]
)


def steps(
    rank: int, stage: str, number: int, partner: int, parts: np.ndarray, **columns: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Rows of one round. parts [steps, 4] seconds; columns: cpu, sequences and checksum [steps]."""
    rows = np.zeros(len(parts), STEP)
    rows["rank"], rows["stage"], rows["round"], rows["partner"] = rank, STAGES.index(stage), number, partner
    rows["step"] = np.arange(len(parts))
    for column, part in enumerate(PARTS):
        rows[part] = parts[:, column]
    for name, values in columns.items():
        rows[name] = values
    return rows


def write(path: Path, about: Mapping[str, Any], tables: Mapping[str, np.ndarray]) -> None:
    """Writes the file whole. about: what is said of the node and its ranks; tables: structured arrays by name."""
    columns: dict[str, Any] = {
        f"{name}.{column}": rows[column] for name, rows in tables.items() for column in rows.dtype.names or ()
    }
    with whole_file(path) as partial, open(partial, "wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps({"version": VERSION, **about})), **columns)


def rows(path: Path, table: str, kind: np.dtype) -> np.ndarray:
    """A table of such a file, as structured rows; none where there is no file."""
    if not path.exists():
        return np.empty(0, kind)
    with np.load(path) as file:
        found = np.empty(len(file[f"{table}.{kind.names[0]}"]) if kind.names else 0, kind)
        for column in kind.names or ():
            found[column] = file[f"{table}.{column}"]
    return found
