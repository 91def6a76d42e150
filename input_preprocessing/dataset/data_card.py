"""Writes DATA_CARD.md: contents, sources and options of a prepared folder, from its prepared-*.json alone.

Equal preparations have equal cards, without dates and paths. `prepare_data.sh` writes the card at the end; this command
writes it for folders of earlier versions, or to add a forgotten --license.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from bert.data.records import DataError
from input_preprocessing.stage import manifest
from input_preprocessing.stage.cli import lock_folder

NAME = "DATA_CARD.md"
_LISTED = 20  # texts by name; if there are more, the first ones and the last
_WORDS = {
    "packed": "packed rows of several sequences each",
    "binned": "sequences in bins of similar length, shuffled",
    "unpacked": "single sequences, shuffled",
}


def render(sets: dict[str, manifest.Manifest]) -> str:
    """The card for the data sets of a folder, by kind."""
    head = "Training data for BERT: masked-LM and next-sentence instances, tokenized and masked, ready to train on."
    return f"# Data card\n\n{head}\n" + "".join(
        _describe(kind, made) for kind, made in sets.items()
    )


def _describe(kind: str, made: manifest.Manifest) -> str:
    options = {name: value for name, value in made.recipe.items() if value not in (None, [], ())}

    def digest_of(digests: dict[str, str]) -> str:
        lines = "".join(f"{digest} {name}\n" for name, digest in sorted(digests.items()))
        return hashlib.md5(lines.encode()).hexdigest()

    digests = {
        "sequences, in any order (multiset digest)": made.multiset_digest,
        "all files (md5 of their digests)": digest_of(made.files),
        "all texts (md5 of their md5s)": digest_of(made.texts),
        **{name: digest for name, digest in made.files.items() if name not in made.records},
    }
    names = sorted(made.texts)
    shown = names if len(names) <= _LISTED else [*names[: _LISTED - 1], names[-1]]
    more = f"\n\nand {len(names) - len(shown):,} more" if len(shown) < len(names) else ""
    return Path(__file__).with_suffix(".md").read_text(encoding="utf-8").format(
        title=kind.capitalize(), kind=kind, what=f"Text: {made.benchmark_text[1]}.", made=made,
        license=made.license or "not given (`--license`)", kind_in_words=_WORDS.get(kind, kind),
        num_shards=len(made.records), texts=_table("text", "md5", {name: made.texts[name] for name in shown}) + more,
        options=_table("option", "value", options), digests=_table("of", "digest", digests),
        versions=_table("program", "version", made.versions) if made.versions else "Not recorded.",
    )  # fmt: skip


def _table(name: str, value: str, rows: Mapping[str, object]) -> str:
    """A Markdown table of two columns."""
    cells = (
        (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows.items()
    )
    return "\n".join(
        [f"| {name} | {value} |", "|---|---|", *(f"| {' | '.join(row)} |" for row in cells)]
    )


def read_sets(folder: Path) -> dict[str, manifest.Manifest]:
    """Manifests in a folder, by kind of data. Raises DataError if there are none, or one is damaged."""
    if paths := sorted(folder.glob("prepared-*.json")):
        return {path.stem.removeprefix("prepared-"): manifest.read(path) for path in paths}
    raise DataError(
        f"{folder} has no prepared-*.json; give the --outputdir of a finished preparation, or its phase's"
    )


def is_current(folder: Path) -> bool:
    """Whether the card matches the manifests."""
    try:
        return (folder / NAME).read_text(encoding="utf-8") == render(read_sets(folder))
    except (OSError, UnicodeDecodeError):
        return False


def write(folder: Path) -> None:
    """Writes the card of a folder atomically, unless it is up to date.

    Raises:
        DataError: there is no manifest, or the card cannot be written.
    """
    if not is_current(folder):
        manifest.write_text(folder / NAME, render(read_sets(folder)))


def main(options: argparse.Namespace) -> None:
    folder: Path = options.folder
    sets = read_sets(folder)
    with lock_folder(folder, exclusive=True):
        if options.license is not None:
            # Read again, under the lock: a preparation may have finished in between.
            for kind, made in read_sets(folder).items():
                sets[kind] = dataclasses.replace(made, license=options.license)
                manifest.write(folder / f"prepared-{kind}.json", sets[kind])
        write(folder)
    if options.json:
        dicts = {kind: dataclasses.asdict(made) for kind, made in sets.items()}
        print(json.dumps({"card": str(folder / NAME), "sets": dicts}))
    print(f"{folder / NAME}: {', '.join(sets)}", file=sys.stderr)
