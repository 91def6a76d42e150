"""Prediction of files: every row, in order, with the model's prediction; a killed prediction resumes."""

from __future__ import annotations

import csv
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bert.data.records import DataError
from common.env import ConfigError
from common.files import is_full, whole_file
from finetune import squad
from finetune.dialect import KINDS, Reading
from finetune.saved import Saved
from finetune.tables import Layout, Rows, lines_told
from finetune.tasks import digest

# A killed prediction loses at most one.
CHUNK = 4096  # rows sorted by length and written together
SECONDS = 10  # between progress lines


def predict(
    model: Saved,
    source: str,
    target: Path,
    columns: tuple[str, ...],
    batch_size: int,
    reading: Reading | None = None,
) -> None:
    """Writes the rows of ``source`` ("-": standard input) with their predictions to ``target``.

    columns: text columns, if they differ from those of training; a row without text has no prediction.
    Raises DataError or ConfigError.
    """
    kind = target.suffix.lower().lstrip(".")
    if kind not in (*KINDS, *(["json"] if model.answers else [])):
        raise ConfigError(f"--output {target}: expected a name ending in .csv, .tsv or .jsonl")
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: there is no folder {target.parent}: create it")
    try:
        _predict(model, source, target, columns, batch_size, reading or Reading())
    except OSError as error:
        told = str(error) if is_full(error) and not error.strerror else error.strerror
        raise ConfigError(f"--output {target}: {told}; the same command continues") from error


def _predict(
    model: Saved,
    source: str,
    target: Path,
    columns: tuple[str, ...],
    batch_size: int,
    reading: Reading,
) -> None:
    kind = target.suffix.lower().lstrip(".")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(source)
        if source == "-":
            # It is read several times: to find the dialect, to check every row, to predict.
            path = Path(folder, "standard input")
            with open(path, "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        elif target.exists() and path.exists() and target.samefile(path):
            raise ConfigError(f"--output {target} is the input file: give another name")
        table = read_rows(model, path, columns, reading)
        # Every row is checked first, so that a bad one at the end does not show after hours.
        names, total = _check(path, table, kind)
        added = _added(model, names)
        # Rows are taken over only if all that determines them is the same, by content.
        about = {"texts": table.texts, "batch_size": batch_size, "input": digest(path)}
        about |= {"added": added, "reading": vars(reading)}
        about["model"] = [
            digest(model.folder / name) for name in ("model.safetensors", "task.json")
        ]
        # Beside the output, where the same command finds it again.
        kept = target.with_name(
            f".{target.name}.rows"
        )  # predictions so far: ``about``, then a JSON row per line
        with open(kept, "a+", encoding="utf-8") as file:
            done = _resume(file, about)
            print(
                f"finetune: {source}: {total:,} rows, {table.form}; "
                f"predicting from {' | '.join(table.texts)}; {done:,} done",
                file=sys.stderr,
            )
            begin = last = time.monotonic()
            rows, count = islice(table, done, None), done
            while chunk := list(islice(rows, CHUNK)):
                for row in _with_predictions(model, table, chunk, added, batch_size):
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                count += len(chunk)
                if (now := time.monotonic()) - last > SECONDS or count == total:
                    speed, last = (count - done) / (now - begin), now
                    left = f"{(total - count) / speed:,.0f} s left"
                    print(
                        f"finetune: {count:,} of {total:,} rows, {speed:,.0f} rows/s, {left}",
                        file=sys.stderr,
                    )
            # The output appears whole; until then its rows are kept beside it.
            _write_output(file, target, kind, names, added, model.facts.get("labels", ()))
        kept.unlink()


@dataclass(frozen=True)
class Texts:
    """Rows of a file to predict. hidden: a column that the output leaves out."""

    texts: tuple[str, ...]
    form: str  # how it was read, for people
    rows: Callable[[], Iterator[tuple[int, dict[str, Any], tuple[str, ...] | None]]]
    hidden: str = ""

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any], tuple[str, ...] | None]]:
        """Line, columns, and the texts, None if one is missing, of each row."""
        return self.rows()


def _with_predictions(
    model: Saved, table: Texts, chunk: list[Any], added: dict[str, str], batch_size: int
) -> Iterator[dict[str, Any]]:
    """Each row with its prediction, under the names in ``added``; null if it has no text."""
    present = [texts for _, _, texts in chunk if texts is not None]
    predictions = iter(model.predict(present, batch_size) if present else [])
    for _, row, texts in chunk:
        found = {"prediction": None} if texts is None else next(predictions)
        # A context would be repeated for each of its questions.
        row.pop(table.hidden, None)
        yield row | {added[name]: value for name, value in found.items() if name in added}


def _added(model: Saved, names: list[str]) -> dict[str, str]:
    """Name in the output of each value of a prediction: its own, or with a number where the user has such a column."""
    plain = ["prediction", "probability" if model.answers else "probabilities"]
    columns = [*plain, *(f"probability_{label}" for label in model.facts.get("labels", ()))]
    suffix, number = "", 1
    while {f"{name}{suffix}" for name in columns} & set(names):
        number += 1
        suffix = f"_{number}"
    if suffix:
        taken = ", ".join(name for name in columns if name in names)
        print(
            f"finetune: the input has a column {taken}: ours is prediction{suffix}", file=sys.stderr
        )
    return {name: name + suffix for name in plain}


def _check(path: Path, table: Texts, kind: str) -> tuple[list[str], int]:
    """Checks every row; returns all columns of the output, and the number of rows. Raises DataError."""
    names: dict[str, None] = {}
    total, lacking = 0, []
    for total, (line, row, texts) in enumerate(table, 1):
        names |= dict.fromkeys(row)
        if texts is None:
            lacking.append(line)
        # TSV is written without quotation marks, as GLUE's files are.
        if kind == "tsv" and any(
            isinstance(cell, str) and set("\t\n") & set(cell)
            for name, cell in row.items()
            if name != table.hidden
        ):
            raise DataError(
                f"{path}: row {total} has a tab or newline, which TSV cannot hold: give --output X.csv"
            )
    if not total:
        raise DataError(f"{path}: has no rows")
    if lacking:
        print(
            f"finetune: no text in {lines_told(lacking)}: no prediction for {len(lacking):,} rows",
            file=sys.stderr,
        )
    if kind == "json" and "id" not in names:
        raise DataError(f"{path}: has no column id, which SQuAD's JSON needs: give --output X.csv")
    return [name for name in names if name != table.hidden], total


def read_rows(model: Saved, path: Path, columns: tuple[str, ...], reading: Reading) -> Texts:
    """The rows of a file to predict. Raises DataError."""
    if model.answers and squad.is_squad(path):
        dataset = squad.read(path, model.facts["squad_version"], needs_answers=False)

        def questions() -> Iterator[tuple[int, dict[str, Any], tuple[str, ...] | None]]:
            for number, question in enumerate(dataset.questions, 1):
                context = dataset.contexts[question.context]
                row = {"id": question.id, "question": question.text, "context": context}
                yield number, row, (question.text, context)

        return Texts(("question", "context"), "SQuAD", questions, hidden="context")
    # A table of questions has these columns, whatever the names in training.
    usual = ("question", "context") if model.answers else tuple(model.facts.get("columns", ()))
    layout = Layout(
        texts=columns, usual=usual, labels=tuple(model.facts.get("labels", ())),
        label=model.facts.get("label_column", ""), reading=reading,
    )  # fmt: skip
    num_texts = 2 if model.answers else len(columns) or model.facts.get("num_texts", 0)
    table = Rows(path, layout, labelled=False, num_texts=num_texts)
    return Texts(
        table.texts,
        table.describe(),
        lambda: ((line, row, table.text(row)) for line, row in table),
    )


def _resume(file: Any, about: dict[str, Any]) -> int:
    """Rows predicted by an earlier run with the same ``about``, in whole chunks; truncates the rest."""
    file.seek(0)
    done = end = 0
    if file.readline() == (first := json.dumps(about) + "\n"):
        end = file.tell()
        for count, line in enumerate(iter(file.readline, ""), 1):
            # A line that was cut off when the process was killed.
            if not line.endswith("}\n"):
                break
            # Only whole chunks: sequences of a chunk are batched by
            # length, so others would round differently.
            if count % CHUNK == 0:
                done, end = count, file.tell()
    file.seek(end)
    file.truncate()
    if not end:
        file.write(first)
    return done


def _write_output(
    file: Any,
    target: Path,
    kind: str,
    names: list[str],
    added: dict[str, str],
    labels: Sequence[str],
) -> None:
    """Converts the predicted rows to the format of the output. A missing value is an empty cell."""
    file.seek(0)
    file.readline()
    with whole_file(target) as partial, open(partial, "w", encoding="utf-8", newline="") as output:
        if kind == "jsonl":
            shutil.copyfileobj(file, output)
            return
        rows = map(json.loads, file)
        if kind == "json":
            # The official script counts an empty text as "no answer".
            answers = {row["id"]: row[added["prediction"]] or "" for row in rows}
            output.write(json.dumps(answers, indent=4, ensure_ascii=False) + "\n")
            return
        suffix = added["prediction"].removeprefix("prediction")
        shares = {label: f"probability_{label}{suffix}" for label in labels}
        own = shares.values() if "probabilities" in added else [added["probability"]]
        plain: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
        writer = csv.DictWriter(
            output,
            [*names, added["prediction"], *own],
            lineterminator="\n",
            **(plain if kind == "tsv" else {}),
        )
        writer.writeheader()
        for row in rows:
            for label, share in row.pop(added.get("probabilities"), {}).items():
                row[shares[label]] = f"{share:.6f}"
            writer.writerow({name: _cell(value) for name, value in row.items()})


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
