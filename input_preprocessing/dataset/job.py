"""A preparation: what it reads, where it writes, and whether it was finished before."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from bert.data.format import open_records
from bert.data.records import DataError
from input_preprocessing.dataset import phases
from input_preprocessing.dataset.inputs import Inputs
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.records import bins
from input_preprocessing.stage import manifest
from input_preprocessing.stage.folder import contents_of
from input_preprocessing.text.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Job:
    """One preparation: its options, what it reads and where it writes."""

    options: argparse.Namespace
    config: SamplingConfig
    inputs: Inputs
    words: Vocabulary

    @property
    def outputdir(self) -> Path:
        """Folder of the data set."""
        path: Path = self.options.outputdir
        return path

    @property
    def instances(self) -> Path:
        """Folder of the instances of each text file."""
        return self.outputdir / "work" / "instances"

    @property
    def instances_of_texts(self) -> list[Path]:
        """The file of the instances of each training text."""
        return [self.instances / f"{path.name}.hdf5" for path in self.inputs.texts]

    @property
    def eval_instances(self) -> Path:
        """Instances of the evaluation text."""
        return self.outputdir / "work" / "eval" / "eval_all.hdf5"

    @property
    def kind(self) -> str:
        """'packed', 'binned' or 'unpacked'."""
        return "packed" if self.options.packed_data else "binned" if self.options.binned_data else "unpacked"

    @property
    def limit(self) -> int | None:
        """Most sequences of --sequences; None: all."""
        wanted: int | None = self.options.sequences
        return wanted

    @property
    def manifest(self) -> Path:
        """File that tells that, and how, the data set was finished."""
        return self.outputdir / f"prepared-{self.kind}.json"

    @property
    def edges(self) -> tuple[int, ...]:
        """Most tokens of each bin, of binned data."""
        return bins.edges_for(self.config.max_seq_length, self.options.edges) if self.kind == "binned" else ()

    def recipe(self) -> dict[str, object]:
        """All that decides the result but the text itself."""
        return {
            "vocab_md5": self.words.md5,
            **dataclasses.asdict(self.config),
            "kind": self.kind,
            "shards": self.options.shards,
            "max_sequences_per_row": self.options.max_sequences_per_row if self.kind == "packed" else 1,
            "edges": list(self.edges),
            "num_eval_samples": self.options.num_eval_samples,
            "sequences": self.limit,
            "folder": phases.FOLDER if self.options.phases and self.kind == "unpacked" else None,
        }

    def is_finished(self) -> bool:
        """Whether an earlier run made all this of this text, and the files are still there."""
        try:
            made = manifest.read(self.manifest)
        except DataError:
            return False
        recipe = {"do_lower_case": True, **made.recipe}  # as before there was a choice
        if any(recipe.get(name) != value for name, value in self.recipe().items()):
            return False
        if not all(_is_whole(self.outputdir / name) for name in made.files):
            return False
        texts = self.inputs.all_texts
        if self.limit:  # the others of a long text were not looked at
            texts = [path for path in texts if path.name in made.texts]
        if {path.name for path in texts} != set(made.texts):
            return False
        return contents_of(texts, "check text", self.options.jobs) == made.texts


def _is_whole(path: Path) -> bool:
    """Whether the file is there and, of records, not cut short."""
    try:
        return path.is_file() and (path.suffix != ".hdf5" or bool(open_records(path)))
    except DataError:
        return False
