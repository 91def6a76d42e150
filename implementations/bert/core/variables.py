"""Every variable that configures a run: a list, a table, and a check for misspelt names.

The names are those of ``launch/variables.txt``, and the check needs no more. A setting of a program
is declared where it is used, by ``env("LR", ...)`` in a Config, from which the table has default
and meaning. ``python -m bert.core.variables [NAME...]`` is the check alone, for the launch scripts,
on any Python, with the settings that follow a script: exit status 2 for a name that looks like a
mistake.
"""

import dataclasses
import difflib
import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.env import ConfigError, variables

_CHECKOUT = Path(__file__).resolve().parents[3]
LIST = _CHECKOUT / "launch" / "variables.txt"
GONE = LIST.with_name("gone.txt")
PAGE = _CHECKOUT / "docs" / "variables.md"
# The Configs of the programs, with those that they hold. By name: this module lies below them.
CONFIGS = (
    "bert.pretraining.config:PretrainingConfig",
    "bert.commands.allreduce:AllReduceConfig",
    "finetune.config:FinetuneConfig",
    "certify.__main__:CertifyConfig",
    "certify.load:LoadConfig",
    "certify.tools:ToolsConfig",
    "review.acceptance.schema:Expected",
)

# Other trainers' names for our variables, beyond what spelling alone finds.
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
# And of settings given to our scripts: in an environment other programs' names mean nothing.
_GIVEN = {
    "NUM_EPOCHS": "EPOCHS",
    "NUM_TRAIN_EPOCHS": "EPOCHS",
    "EARLY_STOPPING": "PATIENCE",
    "EARLY_STOPPING_PATIENCE": "PATIENCE",
    "MAX_LEN": "MAX_SEQ_LENGTH",
    "MAX_LENGTH": "MAX_SEQ_LENGTH",
    "OUTPUT_DIR": "LOGDIR",
}
# Names with these prefixes are meant for us; no other software exports such.
PREFIXES = (
    "DGX",
    "EVAL_",
    "OPT_LAMB_",
    "OPT_ADAM_",
    "SUBMISSION_",
    "DATADIR_",
    "CHECKPOINTDIR_",
    "START_WARMUP",
    "WARMUP_",
    "LR_",
    "BATCHSIZE_",
    "GRADIENT_",
    "NUM_EVAL_",
    "TARGET_MLM_",
    "INIT_LOSS_",
    "LOSS_SCALE_",
    "FP8_",
    "WALLTIME_",
    "NCCL_TEST_",
    "MAX_SAMPLES_",
    "CONTAINER_MOUNT",
    "EXPECTED_",
)
# Other software's names within a letter or two of ours.
FOREIGN = {
    "HOST",
    "GLOBAL_RANK",
    "CPUS",
    "DEVICES",
    "LOG_DIR",
    "RANKS",
    "COUNT",
    "PYTHON3",
    "PYTHON2",
}


@dataclass(frozen=True)
class Entry:
    """One variable as a user sees it; ``default`` is "unset", "required" or the value."""

    name: str
    default: str
    meaning: str


def declared() -> dict[str, Entry]:
    """The settings of all programs. Imports them, and so PyTorch."""
    entries: dict[str, Entry] = {}
    for reference in CONFIGS:
        module, _, name = reference.partition(":")
        for field, variable, _ in variables(
            getattr(importlib.import_module(module), name)
        ):
            entry = Entry(variable.name, shown(field.default), variable.meaning)
            entries.setdefault(variable.name, entry)
    return entries


def shown(default: Any) -> str:
    """A default as users write it."""
    if default is dataclasses.MISSING:
        return "required"
    if default is None or default == "":
        return "unset"
    if isinstance(default, bool):
        return str(int(default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _listed() -> Iterator[tuple[str, str, list[str]]]:
    """(group, name, [default, meaning] for a variable of the launch scripts) of each line of the
    list.
    """
    title = ""
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            title = line.removeprefix("== ")
        elif line and not line.startswith("#"):
            name, *rest = (part.strip() for part in line.split("|", 2))
            yield title, name, rest


def gone() -> dict[str, Entry]:
    """Settings of earlier versions: the value that every run has now, and what to do."""
    lines = GONE.read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ", 2) for line in lines if not line.startswith("#")]
    return {name: Entry(name, value, cure) for name, value, cure in rows}


def _equal(text: str, value: str) -> bool:
    """Whether a variable is unset, or has this value: 1e-06 is 0.000001."""
    try:
        return not text.strip() or float(text) == float(value)
    except ValueError:
        return text.strip() == value


def groups() -> dict[str, list[Entry]]:
    """The list by group. Raises ValueError for a name that is neither declared nor described in the
    list.
    """
    settings = declared()
    by_title: dict[str, list[Entry]] = {}
    for title, name, rest in _listed():
        if not rest and name not in settings:
            raise ValueError(
                f"{LIST}: {name} is not a setting of the trainer and has no description here"
            )
        by_title.setdefault(title, []).append(
            Entry(name, rest[0] or "unset", rest[1]) if rest else settings[name]
        )
    return by_title


def table(environ: Mapping[str, str], width: int | None = None) -> str:
    """All variables by group with their values in ``environ`` or their defaults, for a terminal."""
    width = max(80, width or shutil.get_terminal_size((120, 24)).columns)
    lines = [
        "Variables by purpose; * marks those set in this environment, all others show their default."
    ]
    for title, entries in groups().items():
        lines += ["", title]
        for entry in entries:
            value = environ.get(entry.name) or entry.default
            start = f"{'*' if environ.get(entry.name) else ' '} {entry.name:<24} {value:<14} "
            # A long value takes a line to itself, with the meaning below.
            if len(start) > 42:
                lines.append(start.rstrip())
                start = " " * 42
            meaning = entry.meaning.replace("`", "")
            lines += textwrap.wrap(
                meaning, width, initial_indent=start, subsequent_indent=" " * 42
            )
    return "\n".join(lines)


def markdown() -> str:
    """docs/variables.md: its introduction, then a table per group."""
    lines = [f"{PAGE.read_text(encoding='utf-8').partition('## ')[0].rstrip()}\n"]
    for title, entries in groups().items():
        lines += [f"## {title}", "", "|variable|default|meaning|", "|---|---|---|"]
        for entry in entries:
            default = {"unset": "", "required": "required"}.get(
                entry.default, f"`{entry.default}`"
            )
            lines.append(f"|`{entry.name}`|{default}|{entry.meaning}|")
        lines.append("")
    return "\n".join(lines).rstrip()


def check_names(environ: Mapping[str, str]) -> None:
    """Raises ConfigError, one line, for all exported names that nothing reads and that look meant
    for a run: misspelt ones, and those of settings that are gone.
    """
    if not LIST.is_file():
        return  # the package without its checkout
    known, once = [name for _, name, _ in _listed()], gone()
    mistakes = []
    for name, text in sorted(environ.items()):
        if name in once:
            # As every run has it now: a config of before that says the old default is as true.
            if not _equal(text, once[name].default):
                mistakes.append(f"{name}={text} is gone: {once[name].meaning}.")
        elif near := _suggestion(name, known):
            mistakes.append(f"{name}: did you mean {near}?")
    if mistakes:
        raise ConfigError(
            f"{' '.join(mistakes)} Nothing reads such a variable: correct it, or unset it"
        )


def check_given(names: Iterable[str]) -> None:
    """Raises ConfigError for a setting that follows a script and is none."""
    known, once = [name for _, name, _ in _listed()], gone()
    for name in names:
        if name in known:
            continue
        if name in once:
            raise ConfigError(f"{name} is gone: {once[name].meaning}")
        near = (_GIVEN | SYNONYMS).get(name) or _suggestion(name, known)
        near = near or next(iter(difflib.get_close_matches(name, known, n=1)), None)
        cure = "another program's goes before the command"
        hint = f"did you mean {near}?" if near else f"docs/variables.md has all; {cure}"
        raise ConfigError(f"{name}: no such setting: {hint}")


def from_options(words: Sequence[str], others: Collection[str] = ()) -> dict[str, str]:
    """Settings given on a command line, by variable: ``--lr 0.002`` and ``--lr=0.002`` are LR.

    others: commands and other options, for suggestions. Raises ConfigError for the first word that
    is no setting, with a suggestion, and for a missing value.
    """
    listed = list(_listed()) if words and LIST.is_file() else []
    names = [name for _, name, described in listed if not described]
    if words and not listed:
        names = list(declared())  # the package without its checkout
    options = {f"--{name.lower().replace('_', '-')}": name for name in names}
    values: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        option, has_value, value = word.partition("=")
        spelt = option.lower().replace("_", "-")
        if spelt not in options:
            name = spelt.removeprefix("--").replace("-", "_").upper()
            if any(name == other and described for _, other, described in listed):
                raise ConfigError(
                    f"{option}: {name} is read only by the launch scripts: export it for them"
                )
            # Synonyms before likeness: LEARNING_RATE has few letters of LR, and more of others.
            near = [
                other
                for other, setting in options.items()
                if setting == SYNONYMS.get(name)
            ]
            near = near or difflib.get_close_matches(spelt, [*options, *others], n=1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else "no such setting: docs/variables.md lists them"
            )
            raise ConfigError(f"{option}: {hint}")
        # The end of the line counts as an option: both mean that the value is missing. One dash is
        # a sign, as in --start-warmup-step -76.
        if not has_value and (value := next(rest, "--")).startswith("--"):
            raise ConfigError(f"{option}: its value is missing")
        values[options[spelt]] = value
    return values


def check_read(
    given: Iterable[str], environ: Mapping[str, str], *configs: type
) -> None:
    """Raises ConfigError for a variable given as an option, or after a run script, that neither a
    program's Configs nor the scripts read.
    """
    read = {variable.name for config in configs for _, variable, _ in variables(config)}
    after = environ.get("GIVEN_NAMES", "").split()
    if after:
        # The start test is certify's.
        tests = environ.get("START_TEST") == "1"
        read |= {
            name
            for title, name, described in _listed()
            if described or (tests and title.startswith("Certify"))
        }
    for name in (*given, *after):
        if name not in read:
            raise ConfigError(f"{name} is not read here: remove it")


def _suggestion(name: str, known: list[str]) -> str | None:
    """The variable most likely meant by ``name``; None if it is one itself, or not ours."""
    if name in known or name in FOREIGN:
        return None
    if name in SYNONYMS:
        return SYNONYMS[name]
    meant = {other: other for other in known} | SYNONYMS
    near = [
        (distance, ours)
        for word, ours in meant.items()
        if (distance := _misspelt(name, word))
    ]
    if near:
        # The fewest edits; among equals the first by alphabet, so that the hint is always the same.
        return min(near)[1]
    if name.startswith(PREFIXES):
        # Whatever is nearest, however far: by its beginning the name is meant for us.
        return difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
    return None


def _misspelt(name: str, known: str) -> int:
    """Number of edits between a name and ``known`` if few enough for a typo, 1 or 2; 0 if it is
    another word.

    Up to one edit, from 9 letters on two. In a short word a changed letter makes another word (LD
    is not LR), so only an extra, a missing or two swapped letters count, and below five letters no
    missing one.
    """
    shorter = min(len(name), len(known))
    limit = 2 if shorter >= 9 else 1
    if abs(len(name) - len(known)) > limit:
        return 0
    if len(known) < 5 and len(name) < len(known):
        return 0
    if shorter < 6 and len(name) == len(known) and sorted(name) != sorted(known):
        return 0
    if max(len({*name} - {*known}), len({*known} - {*name})) > limit:
        return 0  # an edit adds or removes one letter at most; this saves thousands of distances at every start
    # Optimal string alignment distance: letters inserted, deleted, changed or swapped with their
    # neighbour.
    before: list[int] = []
    row = list(range(len(known) + 1))
    for i, letter in enumerate(name, 1):
        older, before, row = before, row, [i]
        for j, other in enumerate(known, 1):
            edits = min(
                before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)
            )
            if i > 1 and j > 1 and letter == known[j - 2] and name[i - 2] == other:
                edits = min(edits, older[j - 2] + 1)
            row.append(edits)
    return row[-1] if row[-1] <= limit else 0


if __name__ == "__main__":
    try:
        check_given(sys.argv[1:])
        check_names(os.environ)
    except ConfigError as error:
        print(f"run: error: {error}", file=sys.stderr)
        sys.exit(2)
