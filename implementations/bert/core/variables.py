"""Every variable that configures a run: one list, a table of it, and a guard against names that nobody reads.

The names are those of ``launch/variables.txt``. A setting of the trainer is declared where it is used, by
``env("LR", ...)`` in a Config; default and meaning are taken from the source text, so that neither the table nor the
guard waits for PyTorch. ``python -m bert.core.variables`` is the guard alone, for the launch scripts: exit status 2
where a name looks like a mistake.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert.core.env import ConfigError, Variable, env

IMPLEMENTATIONS = Path(__file__).resolve().parents[2]
LIST = IMPLEMENTATIONS.parent / "launch" / "variables.txt"

# What other trainers call ours, beyond what spelling alone finds.
SYNONYMS = {
    "LEARNING_RATE": "LR",
    "BASE_LR": "LR",
    "WARMUP_RATIO": "WARMUP_PROPORTION",
    "BATCH_SIZE": "BATCHSIZE",
    "MICRO_BATCH_SIZE": "BATCHSIZE",
    "TRAIN_BATCH_SIZE": "BATCHSIZE",
    "ACCUMULATION_STEPS": "GRADIENT_STEPS",
    "GRADIENT_ACCUMULATION_STEPS": "GRADIENT_STEPS",
    "TRAIN_STEPS": "MAX_STEPS",
    "TARGET_ACCURACY": "TARGET_MLM_ACCURACY",
    "WEIGHT_DECAY": "WEIGHT_DECAY_RATE",
    "RANDOM_SEED": "SEED",
    "DTYPE": "PRECISION",
    "NUM_NODES": "DGXNNODES",
    "GPUS_PER_NODE": "DGXNGPU",
}
# Names that begin so are meant for us; the rest of the world exports none.
PREFIXES = (
    *("DGX", "EVAL_", "OPT_LAMB_", "OPT_ADAM_", "SUBMISSION_", "DATADIR_", "CHECKPOINTDIR_", "START_WARMUP", "WARMUP_"),
    *("LR_", "BATCHSIZE_", "GRADIENT_", "NUM_EVAL_", "TARGET_MLM_", "INIT_LOSS_", "LOSS_SCALE_", "FP8_", "WALLTIME_"),
    *("NCCL_TEST_", "MAX_SAMPLES_", "CONTAINER_MOUNT", "EXPECTED_"),
)
# Names of others that lie within a letter or two of one of ours.
FOREIGN = {"HOST", "GLOBAL_RANK", "CPUS", "DEVICES", "LOG_DIR", "RANKS", "COUNT", "PYTHON3", "PYTHON2"}


@dataclass(frozen=True)
class Entry:
    """One variable as a user sees it; ``default`` is "unset", "required" or the value."""

    name: str
    default: str
    meaning: str


def declared(root: Path = IMPLEMENTATIONS) -> dict[str, Entry]:
    """The settings declared by ``env(...)`` in the packages under ``root``, by name, without importing them."""
    found: dict[str, Entry] = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "= env(" in text and path != Path(__file__):
            tree = ast.parse(text)
            constants = _constants(tree)
            for call in (node.value for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "env":
                    entry = _entry(call, constants, path)
                    found.setdefault(entry.name, entry)
    return found


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Literals that a module names at its top level; of a table (a dict), the keys."""
    values: dict[str, Any] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and value is not None:
            if isinstance(value, ast.Dict):
                value = ast.Tuple(elts=[key for key in value.keys if key is not None], ctx=ast.Load())
            try:
                values[target.id] = ast.literal_eval(value)
            except ValueError:
                continue
    return values


def _entry(call: ast.Call, constants: Mapping[str, Any], path: Path) -> Entry:
    code = compile(ast.fix_missing_locations(ast.Expression(call)), str(path), "eval")
    field: dataclasses.Field[Any] = eval(code, {"Path": Path, **constants, "env": env})
    variable: Variable = field.metadata["env"]
    return Entry(variable.name, shown(field.default), variable.meaning)


def shown(default: Any) -> str:
    """A default as users write it."""
    if default is dataclasses.MISSING:
        return "required"
    if default is None or default == "":
        return "unset"
    if isinstance(default, bool):
        return str(int(default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def groups(text: str | None = None) -> dict[str, list[Entry]]:
    """The list, by group. Raises ValueError for a name that is declared nowhere and has no meaning of its own."""
    settings = declared()
    found: dict[str, list[Entry]] = {}
    title = ""
    for line in (LIST.read_text(encoding="utf-8") if text is None else text).splitlines():
        if line.startswith("== "):
            title = line.removeprefix("== ")
        elif line and not line.startswith("#"):
            name, *rest = (part.strip() for part in line.split("|", 2))
            if rest:
                found.setdefault(title, []).append(Entry(name, rest[0] or "unset", rest[1]))
            elif name in settings:
                found.setdefault(title, []).append(settings[name])
            else:
                raise ValueError(f"{LIST}: {name} is not a setting of the trainer, and has no meaning here")
    return found


def table(environ: Mapping[str, str], width: int | None = None) -> str:
    """All variables by group with their values in ``environ``, or else their defaults, for a terminal."""
    width = max(80, width or shutil.get_terminal_size((120, 24)).columns)
    lines = ["Variables by what they are for; * marks what this environment sets, all others show their default."]
    for title, entries in groups().items():
        lines += ["", title]
        for entry in entries:
            value = environ.get(entry.name) or entry.default
            start = f"{'*' if environ.get(entry.name) else ' '} {entry.name:<24} {value:<14} "
            # A long value takes a line of its own, and the meaning stands below it.
            if len(start) > 42:
                lines.append(start.rstrip())
                start = " " * 42
            meaning = textwrap.wrap(
                entry.meaning.replace("`", ""), width, initial_indent=start, subsequent_indent=" " * 42
            )
            lines += meaning
    return "\n".join(lines)


PAGE = """# Variables

A run is configured by environment variables alone. `configs/` exports a system and recipe, `env.sh` a site, and what
you export yourself wins over both, before or after sourcing them. A value that is missing, malformed or out of range
stops the run before it starts, and so does an exported name that nothing reads and that resembles one of these:

```console
$ BATCHSZIE=8 ./run_local.sh
run: error: BATCHSZIE: did you mean BATCHSIZE? Nothing reads such a variable: correct it, or unset it
```

`python -m bert --variables` prints these tables with the values of your shell. They are written by `make variables`
from `launch/variables.txt` and the declarations in the code. Slurm's own variables (`SBATCH_*`) work too. The names of
the last group are for the launch scripts; set them yourself only where you start the ranks by hand.
"""


def markdown() -> str:
    """docs/variables.md."""
    lines = [PAGE]
    for title, entries in groups().items():
        lines += [f"## {title}", "", "| variable | default | meaning |", "|---|---|---|"]
        for entry in entries:
            default = entry.default if entry.default in ("unset", "required") else f"`{entry.default}`"
            lines.append(f"| `{entry.name}` | {default} | {entry.meaning} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def check_names(environ: Mapping[str, str]) -> None:
    """Raises ConfigError, one line, for all exported names that nothing reads and that look meant for a run."""
    if not LIST.is_file():
        return  # the package without its checkout: the list of the launch scripts is not there
    known = [name for name in _listed_names() if name]
    mistakes = [
        f"{name}: did you mean {meant}?" for name in sorted(environ) if (meant := _meant(name, known)) is not None
    ]
    if mistakes:
        raise ConfigError(f"{' '.join(mistakes)} Nothing reads such a variable: correct it, or unset it")


def _listed_names() -> Iterator[str]:
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", "==")):
            yield line.partition("|")[0].strip()


def _meant(name: str, known: list[str]) -> str | None:
    """The variable that was most likely meant by ``name``; None where it is one itself, or nothing of ours."""
    if name in known or name in FOREIGN:
        return None
    if name in SYNONYMS:
        return SYNONYMS[name]
    near = [(distance, other) for other in known if (distance := _misspelt(name, other))]
    if near:
        return min(near)[1]
    if name.startswith(PREFIXES):
        return difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
    return None


def _misspelt(name: str, known: str) -> int:
    """Edits between a name and ``known`` where few enough for a slip of the hand: 1 or 2; 0 where it is another word.

    One edit, from 9 letters on two. In a short word a changed letter makes another word (LD is not LR), so only a
    letter too many, one too few or two swapped count, and below five letters none too few.
    """
    shorter = min(len(name), len(known))
    limit = 2 if shorter >= 9 else 1
    if abs(len(name) - len(known)) > limit:
        return 0
    if len(known) < 5 and len(name) < len(known):
        return 0
    if shorter < 6 and len(name) == len(known) and sorted(name) != sorted(known):
        return 0
    edits = _distance(name, known)
    return edits if edits <= limit else 0


def _distance(a: str, b: str) -> int:
    """Letters to insert, delete, change or swap with their neighbour (the optimal string alignment distance)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            edits = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                edits = min(edits, older[j - 2] + 1)
            row.append(edits)
    return row[-1]


if __name__ == "__main__":
    try:
        check_names(os.environ)
    except ConfigError as error:
        print(f"run: error: {error}", file=sys.stderr)
        sys.exit(2)
