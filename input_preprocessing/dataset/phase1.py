"""phase1/: vocabulary, model sizes and first checkpoint beside the records, remade when what they are made of changes.

What was made of what is known by content: `model.ckpt-28252.json` beside the converted checkpoint has the md5 of both.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.checkpoints.convert import convert
from input_preprocessing.dataset.inputs import Inputs
from input_preprocessing.stage.manifest import md5_of

CHECKPOINT = "model.ckpt-28252"


def fill(phase1: Path, inputs: Inputs, download: Path, vocab_md5: str, lower_case: bool) -> list[Path]:
    """Makes what is not there yet, or is there of other inputs; the files.

    Args:
        phase1: folder to write to.
        inputs: vocabulary and bert_config.json to copy.
        download: folder to look for the TensorFlow checkpoint in.
        vocab_md5: of the vocabulary that the records are made with.
        lower_case: whether their text was lower-cased; where not, tokenizer_config.json says so, as Hugging Face's.

    Raises:
        DataError: the vocabulary has changed since, or the checkpoint cannot be converted.
    """
    phase1.mkdir(exist_ok=True)
    targets = [_copy(inputs.vocab, phase1 / "vocab.txt"), *(_copy(path, phase1 / path.name) for path in inputs.others)]
    if md5_of(targets[0]) != vocab_md5:
        raise DataError(f"{inputs.vocab} changed while it was read; run the same command again once it is complete")
    targets += _note_case(phase1 / "tokenizer_config.json", lower_case)
    converted = phase1 / f"{CHECKPOINT}.pt"
    if checkpoint := _find_checkpoint(download):
        _convert(checkpoint, converted, next(iter(inputs.others), None))
    return [*targets, converted] if converted.is_file() else targets


def _note_case(path: Path, lower_case: bool) -> list[Path]:
    """The file by which exports and fine-tuning know a cased vocabulary, where it is one."""
    if lower_case:
        path.unlink(missing_ok=True)
        return []
    text = json.dumps({"do_lower_case": False}) + "\n"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        with atomic_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    return [path]


def _copy(source: Path, target: Path) -> Path:
    if target.is_file() and md5_of(target) == md5_of(source):
        return target
    if target.is_file():
        print(f"{target} is replaced by {source}, which differs", file=sys.stderr)
    with atomic_file(target) as partial:
        shutil.copyfile(source, partial)
    return target


def _find_checkpoint(folder: Path) -> Path | None:
    """The TensorFlow checkpoint's prefix; MLCommons' folders of them are looked into as well."""
    places = (folder, folder / "tf1_ckpt", folder / "tf2_ckpt")
    return next((place / CHECKPOINT for place in places if (place / f"{CHECKPOINT}.index").is_file()), None)


def _convert(prefix: Path, target: Path, config: Path | None) -> None:
    """Converts the checkpoint unless the target was made of the same bytes, and is still what was made."""
    note = target.with_suffix(".json")
    files = sorted(prefix.parent.glob(f"{prefix.name}.index")) + sorted(prefix.parent.glob(f"{prefix.name}.data-*"))
    parts = [md5_of(path) for path in [*files, *([config] if config else [])]]
    source = hashlib.md5(" ".join(parts).encode()).hexdigest()
    if target.is_file() and _read_note(note) == {"source": source, "target": md5_of(target)}:
        return
    print(f"converting {prefix} to {target}", file=sys.stderr)
    convert(prefix, target, "mlperf", bert_config=config)
    with atomic_file(note) as partial:
        partial.write_text(json.dumps({"source": source, "target": md5_of(target)}) + "\n")


def _read_note(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
