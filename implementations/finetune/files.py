"""Prediction of files: every row, in order, with the model's prediction."""

import csv
import json
import sys
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from common.env import ConfigError
from common.files import whole_file
from finetune import glue
from finetune.dialect import Reading
from finetune.saved import Saved
from finetune.tables import Layout, Rows, first_lines

CHUNK = 4096  # rows sorted by length and predicted together, between progress lines


def predict(
    model: Saved,
    source: Path,
    target: Path,
    columns: tuple[str, ...],
    batch_size: int,
    reading: Reading,
) -> None:
    """Writes the rows of ``source`` with their predictions to ``target``.

    columns: text columns, if they differ from those of training; a row without text has no
    prediction. Raises DataError or ConfigError.
    """
    kind = target.suffix.lower().lstrip(".")
    if kind not in ("csv", "jsonl"):
        raise ConfigError(
            f"--output {target}: expected a name ending in .csv or .jsonl"
        )
    if not target.parent.is_dir():
        raise ConfigError(
            f"--output {target}: there is no folder {target.parent}: create it"
        )
    if target.exists() and source.exists() and target.samefile(source):
        raise ConfigError(f"--output {target} is the input file: give another name")
    table = _table(model, source, columns, reading)
    # Every row is checked first, so that a bad one at the end does not show after hours.
    rows = list(table)
    texts = [table.text(row) for _, row in rows]
    labels = model.facts.get("labels", ())
    shares = [f"probability_{label}" for label in labels]
    new_columns = [
        "prediction",
        *(shares or (["probability"] if model.answers else [])),
    ]
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    # The user's columns stay as they are, such as those of an earlier prediction.
    marks = chain([""], (f"_{number}" for number in count(2)))
    added = (*new_columns, "probabilities")
    mark = next(m for m in marks if not {f"{name}{m}" for name in added} & {*names})
    if mark:
        say(f"{source} has such columns: the new ones are called prediction{mark} ...")
    message = f"{len(rows):,} rows, {table.describe()}; predicting from {' | '.join(table.texts)}"
    say(f"{source}: {message}")
    lacking = [
        line for (line, _), text in zip(rows, texts, strict=True) if text is None
    ]
    if lacking:
        say(
            f"no text in {first_lines(lacking)}: no prediction for {len(lacking):,} rows"
        )
    predictions = _predictions(model, texts, batch_size)
    # Without the other answers to a question.
    predicted = [
        row
        | {f"{name}{mark}": prediction[name] for name in prediction if name in added}
        for (_, row), prediction in zip(rows, predictions, strict=True)
    ]
    every = [*names, *(f"{name}{mark}" for name in new_columns)]
    label_mark = model.facts.get("label_separator", "")
    _write(target, kind, every, predicted, mark, label_mark)


def _table(
    model: Saved, path: Path, columns: tuple[str, ...], reading: Reading
) -> Rows:
    facts = model.facts
    # A table of questions has these columns, whatever the names in training.
    usual = (
        ("question", "context") if model.answers else tuple(facts.get("columns", ()))
    )
    layout = Layout(
        texts=columns,
        usual=usual,
        labels=tuple(facts.get("labels", ())),
        label=facts.get("label_column", ""),
        reading=reading,
    )
    num_texts = 2 if model.answers else len(columns) or facts.get("num_texts", 0)
    return Rows(path, layout, labelled=False, num_texts=num_texts)


def _predictions(
    model: Saved, texts: Sequence[tuple[str, ...] | None], batch_size: int
) -> list[dict[str, Any]]:
    """Prediction of each row; null if it has no text."""
    present = [text for text in texts if text is not None]
    predictions: list[dict[str, Any]] = []
    for begin in range(0, len(present), CHUNK):
        predictions += model.predict(present[begin : begin + CHUNK], batch_size)
        say(f"{len(predictions):,} of {len(present):,} rows")
    if note := model.cut_note(predictions):
        say(note)
    in_order = iter(predictions)
    return [{"prediction": None} if text is None else next(in_order) for text in texts]


def _write(
    target: Path,
    kind: str,
    columns: list[str],
    rows: Sequence[dict[str, Any]],
    mark: str,
    label_mark: str,
) -> None:
    """The output appears whole. A missing value is an empty cell. mark: end of the added names;
    label_mark: between several labels.
    """
    said = f"prediction{mark}"
    with (
        whole_file(target) as partial,
        open(partial, "w", encoding="utf-8", newline="") as output,
    ):
        if kind == "jsonl":
            output.writelines(
                json.dumps(row, ensure_ascii=False) + "\n" for row in rows
            )
            return
        writer = csv.DictWriter(output, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            shares = row.get(f"probabilities{mark}", {})
            cells = {
                name: glue.cell(value, label_mark if name == said else "")
                for name, value in row.items()
                if name in columns
            }
            writer.writerow(
                cells
                | {f"probability_{k}{mark}": f"{v:.6f}" for k, v in shares.items()}
            )


def say(text: str) -> None:
    print(f"finetune: {text}", file=sys.stderr)
