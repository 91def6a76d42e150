"""Sharded checkpoints: every rank writes its own part, and any number of ranks can read what they
need.

``step_<step>/`` has a file per rank, with its shard of the masters and the rule's states and their
places in the parameters, and ``index.pt`` with all else. The ranks write into a hidden folder,
which is renamed when all are done, so that it appears whole or not at all. All nodes must see the
same folder.
"""

import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert.checkpoint import deepspeed_files, sums
from common.files import name_folder, whole_file

INDEX = "index.pt"
_NAME = re.compile(r"step_\d+\.pt|(global_step|step_)\d+")
POLL_SECONDS = 0.05


class ShardError(RuntimeError):
    """Not all ranks have written their part."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's share of a checkpoint. token: identifies the checkpoint; equal on all ranks.

    abandoned: set if the other ranks will write no more.
    """

    rank: int
    num_ranks: int
    token: int
    abandoned: threading.Event

    def write(
        self, directory: Path, step: int, state: Mapping[str, Any], keep: int
    ) -> Path:
        """Writes this rank's part; rank 0 waits for the others, renames the folder, and keeps the
        newest ``keep``.

        state: "shard", of ShardState.shard_state(), and on rank 0 "index", the rest to be saved.
        Raises ShardError if another rank has failed, OSError on a full disk.
        """
        # With the token: parts that a killed run left for the same step do not mix with these.
        hidden = directory / f".step_{step:010d}.{self.token:016x}"
        path = directory / f"step_{step:010d}"
        hidden.mkdir(parents=True, exist_ok=True)
        try:
            save(hidden / _file_name(self.rank), state["shard"])
        except Exception as error:
            with suppress(OSError):  # on a full disk the file is created, but empty
                (hidden / f"failed_{self.rank:05d}").write_text(
                    str(error), encoding="utf-8"
                )
            raise
        # Files, not a collective, tell rank 0 who is done: this runs on the writer's thread, while
        # the ranks' collectives belong to the step in progress.
        if self.rank:
            return path
        try:
            missing = set(range(self.num_ranks))
            while missing := {
                rank for rank in missing if not (hidden / _file_name(rank)).is_file()
            }:
                for failed in hidden.glob("failed_*"):
                    reason = (
                        failed.read_text(encoding="utf-8")
                        or "it could not write its part, nor why"
                    )
                    raise ShardError(f"rank {int(failed.name[7:])}: {reason}")
                if self.abandoned.is_set():
                    raise ShardError(
                        f"the run ended before rank {min(missing)} had written its part"
                    )
                time.sleep(POLL_SECONDS)
            files = [hidden / _file_name(rank) for rank in range(self.num_ranks)]
            # In the index: a part of another checkpoint is sound in itself, and only this tells it.
            checksums = {file.name: sums.sum_of(file) for file in files}
            ranks = {
                "num_ranks": self.num_ranks,
                "token": self.token,
                "sums": checksums,
            }
            # Last, with the rename: who sees step_* sees all of it.
            save(hidden / INDEX, {**state["index"], **ranks})
            name_folder(hidden, path)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        prune(directory, keep, step)
        return path


def save(path: Path, state: Mapping[str, Any]) -> None:
    """torch.save, whole or not at all. Raises NoSpaceError on a full disk.

    To an open file: PyTorch's own writer reports a full disk as "iostream error".
    """
    with whole_file(path, num_bytes(state)) as partial, open(partial, "wb") as file:
        torch.save(state, file)


def read_file(path: Path, mmap: bool = False) -> Any:
    """The content of a PyTorch file, on the CPU. Raises what torch.load raises."""
    # A pickle can run code. With weights_only a file from elsewhere gives tensors or an error.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints of all kinds in a folder, oldest first: files, or folders of
    shards, ours or DeepSpeed's.
    """
    folders = (index.parent for index in directory.glob(f"*/{INDEX}"))
    paths = [*directory.glob("*.pt"), *folders]
    # Not copies that a user has set aside, such as step_200_keep.pt.
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint, also of one that is being written; -1 without one."""
    digits = re.match(r"\.?(?:global_step|step_)(\d+)(?:\.|$)", path.name)
    return int(digits[1]) if digits else -1


def prune(directory: Path, keep: int, step: int) -> None:
    """Removes all complete checkpoints but the newest ``keep`` of all kinds up to ``step``, the one
    just written, and incomplete ones up to it.

    Complete ones after it are of an attempt that is being repeated. Not incomplete ones: ranks that
    are ahead write the parts of the next one already.
    """
    hidden = [path for path in _unfinished(directory) if step_of(path) <= step]
    known = complete(directory)
    kept = [path for path in known if step_of(path) <= step][-keep:]
    _remove([path for path in known if path not in kept] + hidden)


def remove_unfinished(directory: Path) -> None:
    """Removes what killed runs left. For the one writer of a folder, before it writes."""
    _remove(_unfinished(directory))


def _unfinished(directory: Path) -> list[Path]:
    return [*directory.glob(".step_*.*"), *directory.glob(".global_step*.*")]


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if not path.is_dir():
            path.unlink(missing_ok=True)
            continue
        if not path.name.startswith("."):
            # Unfinished by its name first: a kill leaves no half that would count as complete.
            path = path.rename(path.with_name(f".{path.name}.removed"))
        shutil.rmtree(path, ignore_errors=True)


def num_bytes(state: Any) -> int:
    """Bytes of all tensors in nested dicts, each counted once."""
    values, storages = [state], {}
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, Tensor):
            # By address: masters are listed under two names, and written once.
            storages[value.data_ptr()] = value.nbytes
    return sum(storages.values())


def _file_name(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


# Part of a flattened parameter: its name, index of the first number, the numbers.
Span = tuple[str, int, Tensor]


class ShardedTensors(Mapping[str, Tensor]):
    """Parameters by name, assembled on access from the ranks' memory-mapped files. token: the
    checkpoint's, if any.
    """

    def __init__(
        self, shapes: Mapping[str, Any], spans: Iterable[Span], token: int = 0
    ) -> None:
        self.token = token
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.spans: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in shapes}
        for name, start, numbers in spans:
            self.spans[name].append((start, numbers))

    def __getitem__(self, name: str) -> Tensor:
        size, (_, first) = self.shapes[name].numel(), self.spans[name][0]
        if len(first) == size:  # no copy of what one file has
            return first.view(self.shapes[name])
        whole = torch.empty(size, dtype=first.dtype)
        for _, start, numbers in self.of(name):
            whole[start : start + len(numbers)].copy_(numbers)
        return whole.view(self.shapes[name])

    def of(self, name: str) -> Iterator[Span]:
        """The spans of a parameter in the files."""
        return ((name, *span) for span in self.spans[name])

    def __contains__(self, name: object) -> bool:
        return name in self.spans  # Mapping's own would assemble it

    def __iter__(self) -> Iterator[str]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)


def spans_of(tensors: Mapping[str, Tensor], name: str) -> Iterable[Span]:
    """A tensor as spans: those in the files, or all of it as one."""
    return (
        tensors.of(name)
        if isinstance(tensors, ShardedTensors)
        else [(name, 0, tensors[name].detach().reshape(-1))]
    )


Held = tuple[Mapping[str, Tensor], Iterable[tuple[str, int, int, int]]]  # see assembled


def assembled(
    index: Mapping[str, Any], held: Sequence[Held], token: int = 0
) -> dict[str, Any]:
    """An optimizer's state, whose tensors are assembled on access.

    index: shapes of the parameters, and what the state has beside parts; held: flat buffers by part of the state, and
    for each segment in them (parameter's name, first number in it, begin in the buffer, size).
    """
    state = {name: value for name, value in index.items() if name != "shapes"}
    for part in held[0][0]:
        spans = (
            (name, at, flats[part][a : a + n])
            for flats, segments in held
            for name, at, a, n in segments
        )
        state[part] = ShardedTensors(index["shapes"], spans, token)
    return state


def check(path: Path, rank: int, size: int) -> None:
    """Compares a rank's share of a checkpoint's files, every ``size``-th, with their checksums.

    Raises ChecksumError, or what zipfile and torch.load raise for a missing or damaged file.
    """
    # The index on every rank: what it says of the parts must be sound before they are compared.
    sums.check(path / INDEX)
    index = read_file(path / INDEX)
    # Earlier versions noted none: a file's own tell all but a swap.
    names = map(_file_name, range(index["num_ranks"]))
    known = index.get("sums") or dict.fromkeys(names)
    for name, value in list(known.items())[rank::size]:
        sums.check(path / name, value)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's state as from a single file; its tensors are assembled on access.

    Raises what torch.load raises for a missing or damaged file.
    """
    index = read_file(path / INDEX)
    # Mapped: a rank that needs a part of the parameters reads no more than that from the files.
    held: list[Held]
    if "segments" in index:
        files = deepspeed_files.rank_files(path, index["num_ranks"])
        flats = map(deepspeed_files.parts, files)
        held = list(zip(flats, index.pop("segments"), strict=True))
    else:
        files = [path / _file_name(rank) for rank in range(index["num_ranks"])]
        parts = [read_file(file, mmap=True) for file in files]
        held = [(part["parts"], part["segments"]) for part in parts]
    optimizer = assembled(index["optimizer"], held, index["token"])
    # fp32 masters serve as the weights: those in 16 bits are cast from them.
    return {**index, "optimizer": optimizer, "model": optimizer["masters"]}
