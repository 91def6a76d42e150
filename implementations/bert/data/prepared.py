"""Manifests of data sets (prepared-*.json): what prepare_data.sh made, and of what."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, get_origin

import numpy as np

from common.files import object_of

from .format import atomic_file
from .records import DataError, Metadata, Records

# The benchmark's files (MLCommons' retired_benchmarks/bert/dataset.md), by md5.
VOCAB_MD5 = "64800d5d8528ce344256daf115d4965e"
NUM_PARTS = 500  # of its text
TEXT_MD5 = {
    "part-00000-of-00500": "a64a7c31eff5cd38ae6d94f7a6229dab",
    "part-00001-of-00500": "549a9ed4f805257245bec936563abfd0",
    "part-00002-of-00500": "1a1366ddfc03aef9d41ce552ee247abf",
    "part-00497-of-00500": "66835aa75d4855f2e678e8f3d73812e9",
    "part-00498-of-00500": "e6d68a7632e9f4aa1a94128cce556dc9",
    "part-00499-of-00500": "b3b087ad24e3770d879a351664cebc5a",
    "eval.txt": "2a220f790517261547b1b45ed3ada07a",
}
# Digest of input_ids of the benchmark's 10,000 evaluation samples, from NVIDIA's
# eval_varlength.chk.
PUBLISHED_EVALUATION = "611d8bae26646145e1c33338a27ba124"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """A finished data set."""

    text: str  # summary for display
    sequences: int
    rows: int
    tokens: int
    eval_samples: int
    multiset_digest: str  # of the training instances, in any order
    texts: dict[str, str]  # md5 of each text file
    recipe: dict[str, Any]  # all options that determine the result
    files: dict[str, str]  # digest_of each file, by path in the folder
    license: str = ""  # of the texts, in manifests of earlier versions
    versions: dict[str, str]  # of the software used
    # What the records of each folder say they were made of.
    sources: dict[str, list[list[str]]]

    @property
    def records(self) -> list[str]:  # training files
        return [
            name
            for name in self.files
            if name.endswith(".hdf5") and not name.startswith("eval/")
        ]

    @property
    def evaluation(self) -> list[str]:
        return [name for name in self.files if name.startswith("eval/")]

    @property
    def benchmark_text(self) -> tuple[bool | None, str]:
        """Whether the text is the benchmark's (False: partly, None: not at all), and the same in
        words.
        """
        # The evaluation text is among the texts, but is no part.
        count = len(self.texts) - 1
        wrong = [name for name, md5 in TEXT_MD5.items() if self.texts.get(name) != md5]
        if len(wrong) == len(TEXT_MD5):
            return (
                None,
                f"not the benchmark's: {count} training files of another corpus",
            )
        if wrong or count != NUM_PARTS:
            return (
                False,
                f"partly the benchmark's: {[*wrong, 'a part'][0]} is missing or has another md5",
            )
        return (
            True,
            f"the benchmark's: {NUM_PARTS} parts, all {len(TEXT_MD5)} known md5",
        )

    def difference(self, name: str, metadata: Metadata) -> str:
        """The attribute in which a record file is not as prepared, with both values; empty if none.

        Digests of contents do not cover attributes.
        """
        wanted = {
            key: value for key, value in self.recipe.items() if hasattr(metadata, key)
        }
        recorded = {key: getattr(metadata, key) for key in wanted}
        wanted["source"] = self.sources.get(str(Path(name).parent))
        recorded["source"] = [list(each) for each in metadata.source]
        for key, value in wanted.items():
            if recorded[key] != value:
                return f"another {key} than prepared ({recorded[key]}, not {value})"
        return ""


def write(path: Path, manifest: Manifest) -> None:
    entries = dataclasses.asdict(manifest)
    text = json.dumps({**entries, "md5": _md5_of_entries(entries)}, indent=1)
    with atomic_file(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> Manifest:
    """A manifest as it was written. Raises DataError if it was not, or by another version."""
    entries = object_of(path)
    recorded = entries.pop("md5", None)
    types = {field.name: field.type for field in dataclasses.fields(Manifest)}
    if (
        recorded != _md5_of_entries(entries)
        or entries.keys() != types.keys()
        or not all(
            isinstance(entries[name], get_origin(kind) or kind)  # type: ignore[arg-type]
            for name, kind in types.items()
        )
    ):
        raise DataError(
            f"{path} is unreadable, was changed after it was written or is of another version; "
            "restore it, or prepare the data again"
        )
    return Manifest(**entries)


def _md5_of_entries(entries: dict[str, Any]) -> str:
    return hashlib.md5(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def published_digest(records: Records) -> str:
    """Digest of input_ids like NVIDIA's: md5 of the printed list of the md5 of each printed row."""
    # offsets[0] is 0 and the last one the end: neither splits.
    rows = np.split(records.input_ids, records.sequence_offsets[1:-1])
    return hashlib.md5(
        str(
            [hashlib.md5(str(ids.tolist()).encode()).hexdigest() for ids in rows]
        ).encode()
    ).hexdigest()
