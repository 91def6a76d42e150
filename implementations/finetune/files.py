"""Prediction of files: every row, in order, with the model's prediction; a killed prediction resumes."""

from __future__ import annotations

import csv
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from bert.data.records import DataError
from common.env import ConfigError
from common.files import whole_file
from finetune import squad
from finetune.saved import Saved
from finetune.tables import KINDS, Layout, Rows
from finetune.tasks import digest

CHUNK = 4096  # rows sorted by length and written together
SECONDS = 10  # between progress lines


def predict(
    model: Saved, source: str, target: Path, columns: tuple[str, ...], batch_size: int
) -> None:
    """Writes the rows of ``source`` ("-": standard input) with their predictions to ``target``.

    columns: text columns, if they differ from those of training. Raises DataError or ConfigError.
    """
    kind = target.suffix.lower().lstrip(".")
    if kind not in (*KINDS, *(["json"] if model.answers else [])):
        raise ConfigError(f"--output {target}: expected a name ending in .csv, .tsv or .jsonl")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(source)
        if source == "-":
            path = Path(folder, "standard input")
            with open(path, "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        elif target.exists() and path.exists() and target.samefile(path):
            raise ConfigError(f"--output {target} is the input file: give another name")
        texts, names, total = _check(model, path, columns, kind)
        about = {"texts": texts, "batch_size": batch_size, "input": digest(path)}
        about["model"] = [
            digest(model.folder / name) for name in ("model.safetensors", "task.json")
        ]
        kept = target.with_name(
            f".{target.name}.rows"
        )  # predictions so far: ``about``, then a JSON row per line
        with open(kept, "a+", encoding="utf-8") as file:
            done = _resume(file, about)
            print(
                f"finetune: {source}: {total:,} rows, text {' | '.join(texts)}; {done:,} done",
                file=sys.stderr,
            )
            begin = last = time.monotonic()
            rows, count = islice(read_rows(model, path, columns)[1], done, None), done
            while chunk := list(islice(rows, CHUNK)):
                predictions = model.predict(
                    [tuple(row[name] for name in texts) for row in chunk], batch_size
                )
                for row, found in zip(chunk, predictions, strict=True):
                    row.pop("context", None) if model.answers else None
                    found.pop("n_best", None)
                    file.write(json.dumps(row | found, ensure_ascii=False) + "\n")
                file.flush()
                count += len(chunk)
                if (now := time.monotonic()) - last > SECONDS or count == total:
                    speed, last = (count - done) / (now - begin), now
                    left = f"{(total - count) / speed:,.0f} s left"
                    print(
                        f"finetune: {count:,} of {total:,} rows, {speed:,.0f} rows/s, {left}",
                        file=sys.stderr,
                    )
            added = (
                ["probability"]
                if model.answers
                else [f"probability_{label}" for label in model.facts["labels"]]
            )
            _write_output(file, target, kind, [*dict.fromkeys([*names, "prediction", *added])])
        kept.unlink()


def _check(
    model: Saved, path: Path, columns: tuple[str, ...], kind: str
) -> tuple[tuple[str, ...], list[str], int]:
    """Checks every row; returns the text columns, all columns, and the number of rows. Raises DataError."""
    texts, rows = read_rows(model, path, columns)
    names: dict[str, None] = {}
    total = 0
    for total, row in enumerate(rows, 1):
        names |= dict.fromkeys(row)
        if model.answers and not row[texts[1]].strip():
            raise DataError(f"{path}: row {total} has an empty {texts[1]}")
        if kind == "tsv" and any(
            isinstance(cell, str) and set("\t\n") & set(cell) for cell in row.values()
        ):
            raise DataError(
                f"{path}: row {total} has a tab or newline, which TSV cannot hold: give --output X.csv"
            )
    if not total:
        raise DataError(f"{path}: has no rows")
    if kind == "json" and "id" not in names:
        raise DataError(f"{path}: has no column id, which SQuAD's JSON needs: give --output X.csv")
    return texts, [name for name in names if not (model.answers and name == "context")], total


def read_rows(
    model: Saved, path: Path, columns: tuple[str, ...]
) -> tuple[tuple[str, ...], Iterator[dict[str, Any]]]:
    """Text columns of a file, and its rows."""
    if model.answers and _is_squad(path):
        dataset = squad.read(path, model.facts["squad_version"], needs_answers=False)
        pairs = ((question, dataset.contexts[question.context]) for question in dataset.questions)
        return ("question", "context"), (
            {"id": q.id, "question": q.text, "context": text} for q, text in pairs
        )
    usual = ("question", "context") if model.answers else tuple(model.facts.get("columns", ()))
    if model.answers and not columns:
        columns = usual
    layout = Layout(texts=columns, usual=usual, labels=tuple(model.facts.get("labels", ())))
    table = Rows(
        path, layout, labelled=False, num_texts=len(columns) or model.facts.get("num_texts", 0)
    )
    return table.texts, (row for _, row in table)


def _is_squad(path: Path) -> bool:
    """Whether a file is a single JSON object, like SQuAD's, rather than one per line."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            first = file.readline()
        return first.lstrip().startswith("{") and "data" in json.loads(first)
    except ValueError:
        return True
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _resume(file: Any, about: dict[str, Any]) -> int:
    """Rows predicted by an earlier run with the same ``about``, in whole chunks; truncates the rest."""
    file.seek(0)
    done = end = 0
    if file.readline() == (first := json.dumps(about) + "\n"):
        end = file.tell()
        for count, line in enumerate(iter(file.readline, ""), 1):
            if not line.endswith("}\n"):
                break
            if count % CHUNK == 0:
                done, end = count, file.tell()
    file.seek(end)
    file.truncate()
    if not end:
        file.write(first)
    return done


def _write_output(file: Any, target: Path, kind: str, fields: list[str]) -> None:
    file.seek(0)
    file.readline()
    with whole_file(target) as partial, open(partial, "w", encoding="utf-8", newline="") as output:
        if kind == "jsonl":
            shutil.copyfileobj(file, output)
        elif kind == "json":
            answers = {row["id"]: row["prediction"] for row in map(json.loads, file)}
            output.write(json.dumps(answers, indent=4, ensure_ascii=False) + "\n")
        else:
            plain: dict[str, Any] = {
                "delimiter": "\t",
                "quoting": csv.QUOTE_NONE,
                "quotechar": None,
            }
            writer = csv.DictWriter(
                output, fields, lineterminator="\n", **(plain if kind == "tsv" else {})
            )
            writer.writeheader()
            for row in map(json.loads, file):
                row |= {
                    f"probability_{label}": f"{share:.6f}"
                    for label, share in row.pop("probabilities", {}).items()
                }
                writer.writerow(
                    {name: x if isinstance(x, str) else json.dumps(x) for name, x in row.items()}
                )
