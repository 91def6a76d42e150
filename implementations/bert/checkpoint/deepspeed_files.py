"""The files that DeepSpeed's save_checkpoint writes, without DeepSpeed: one of the model, and of each
rank one with its flat part of the fp32 masters and the optimizer's state (ZeRO stages 1 and 2).

They are pickles of DeepSpeed's own classes. Of a pickle only tensors and plain containers are made
here; an object of any other class becomes an empty one, and nothing of it is called.
"""

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MODEL = "mp_rank_00_model_states.pt"
_RANK = (
    "*zero_pp_rank_{}_mp_rank_00_optim_states.pt"  # begins with bf16_ in that precision
)
_PLAIN = re.compile(
    r"(collections (OrderedDict|defaultdict)|builtins (set|dict|list|tuple)|torch (Size|device|\w*Storage|[a-z]+\d+\w*)"
    r"|torch\._utils _rebuild_(tensor_v2|parameter)|torch\.storage \w+|torch\.serialization _get_layout)"
)


class UnknownError(RuntimeError):
    """What is in such a file cannot be taken."""


class _Inert:
    """An object of a class that is not made here."""

    def __new__(cls, *arguments: Any, **named: Any) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if _PLAIN.fullmatch(f"{module} {name}"):
            return super().find_class(module, name)
        return type(name, (_Inert,), {})


_TENSORS_ALONE = SimpleNamespace(Unpickler=_Unpickler, load=None, __name__="tensors")


def read(path: Path) -> Any:
    """The content of a file, memory-mapped. Raises what torch.load raises."""
    return torch.load(
        path,
        map_location="cpu",
        weights_only=False,
        mmap=True,
        pickle_module=_TENSORS_ALONE,
    )


def found(folder: Path) -> Path | None:
    """The model's file of a checkpoint, or of the newest in a folder that save_checkpoint was
    given.
    """
    latest = folder / "latest"
    names = [latest.read_text(encoding="utf-8").strip()] if latest.is_file() else []
    places = [folder, *(folder / name for name in names)]
    files = (
        place / name for place in places for name in (MODEL, f"zero_pp_rank_0_{MODEL}")
    )
    return next(filter(Path.is_file, files), None)


def rank_files(folder: Path, num_ranks: int) -> list[Path]:
    """Each rank's file. Raises UnknownError if there is not one of each."""
    found = [sorted(folder.glob(_RANK.format(rank))) for rank in range(num_ranks)]
    for rank, paths in enumerate(found):
        if len(paths) != 1:
            raise UnknownError(f"{len(paths)} files of rank {rank} of {num_ranks}")
    return [path for (path,) in found]


def parts(path: Path) -> dict[str, Tensor]:
    """A rank's flat masters, and the states of a rule of ours."""
    saved = read(path)["optimizer_state_dict"]
    (masters,) = saved["single_partition_of_fp32_groups"]
    (states,) = saved["base_optimizer_state"]["state"].values()
    return {"masters": masters.detach(), **states}


def weights(path: Path) -> tuple[dict[str, Any], list[tuple[str, int, Tensor]]]:
    """Shapes of the parameters, and their spans: of the fp32 masters, if there are any beside the
    model's file, else of its weights. Raises UnknownError for other stages and layouts.
    """
    model = read(path)
    # Of each group of parameters, in its order; tied ones once.
    groups = model.get("param_shapes")
    if groups is None:
        named = model["module"]
        return {name: t.shape for name, t in named.items()}, [
            (name, 0, tensor.detach().reshape(-1)) for name, tensor in named.items()
        ]
    first, *_ = rank_files(path.parent, 1)
    count = read(first)["optimizer_state_dict"].get("partition_count")
    num_ranks = max(count) if isinstance(count, list) else count
    ranks = [
        read(p)["optimizer_state_dict"] for p in rank_files(path.parent, num_ranks)
    ]
    if "single_partition_of_fp32_groups" not in ranks[0]:
        raise UnknownError(
            "ZeRO stage 3: its own zero_to_fp32.py makes a pytorch_model.bin"
        )
    spans: list[tuple[str, int, Tensor]] = []
    gaps = ranks[0].get("param_alignment_paddings") or [
        [0] * len(group) for group in groups
    ]
    for number, group in enumerate(groups):
        flats = [
            rank["single_partition_of_fp32_groups"][number].detach() for rank in ranks
        ]
        spans += _spans(group, gaps[number], flats)
    return {name: shape for group in groups for name, shape in group.items()}, spans


def _spans(
    shapes: dict[str, Any], gaps: list[int], flats: list[Tensor]
) -> Iterator[tuple[str, int, Tensor]]:
    """The parameters in a group's flat parts, which lie end to end, cut where a part ends."""
    begins = [0]
    for flat in flats:
        begins.append(begins[-1] + flat.numel())
    at = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        size = torch.Size(shape).numel()
        for begin, flat in zip(begins, flats, strict=False):
            low, high = max(at, begin), min(at + size, begin + flat.numel())
            if low < high:
                yield name, low - at, flat[low - begin : high - begin]
        at += size + gap
    # What is left over is padding to a multiple of twice the ranks.
    if not at <= begins[-1] + sum(gaps[-1:]) < at + 4 * len(flats):
        raise UnknownError(f"{begins[-1]:,} numbers for parameters of {at:,}")
