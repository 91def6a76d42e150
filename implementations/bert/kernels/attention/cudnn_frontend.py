"""cuDNN's fused attention through nvidia-cudnn-frontend (the module ``cudnn``), on the packed
projections in place.

Queries, keys and values are read from the projection's output, by strides and by offsets of each
sequence ("ragged" tensors), and their gradients are written side by side into one tensor: nothing
is copied or stacked. cuDNN compiles a plan for each size of batch, so this is for batches of a
fixed capacity, as in a CUDA graph.

Dropout uses cuDNN's own random numbers, with a seed per site of the forward pass, so that
recomputation repeats the mask. The gradient of the queries is summed by atomic additions, and so
not reproducible bit for bit. No fp8: cuDNN has no fp8 backward pass of ragged sequences on Hopper.
"""

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert.kernels.support.dropout import ForwardPass
from common.env import ConfigError
from common.process import one_line, root_cause

SITES = 256  # seeds made at a time
# Odd, so that no two sites of a pass share a seed.
SEED_STEP = 0x9E3779B97F4A7C15 - 2**64
MOST_PLANS = 16  # sizes of batches whose plans are cached


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Key of a plan: sequences (empty ones included), the longest allowed, tokens in all."""

    num_sequences: int
    longest: int
    num_tokens: int
    num_heads: int
    width: int
    dtype: torch.dtype
    dropout: float


class Graph(NamedTuple):
    """A cuDNN graph, and its tensors by name."""

    graph: Any
    tensors: dict[str, Any]


def make_graph(sizes: Sizes, *, backward: bool, **where: Any) -> Graph:
    """A forward or backward pass, not compiled yet; ``where`` goes to ``pygraph``.

    Forward: packed projections (q, k, v) -> context, sums (logarithms of the softmax's); backward:
    these and the context's gradient -> dq, dk, dv. The workspace is for the tokens, not for
    sequences of full length.
    """
    cudnn = importlib.import_module("cudnn")
    types = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=types.BFLOAT16 if sizes.dtype == torch.bfloat16 else types.HALF,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        **where,
    )
    tensors = _shared_tensors(graph, sizes, types)

    def declare(name: str, tensor: Any = None) -> Any:
        """An input, or an output, which is the given tensor."""
        dim, stride, kind, offsets = _form(name, sizes, types)
        if tensor is None:
            tensor = graph.tensor(name=name, dim=dim, stride=stride, data_type=kind)
        else:
            tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)
        if offsets:
            tensor.set_ragged_offset(tensors[offsets])
        tensors[name] = tensor
        return tensor

    softmax: dict[str, Any] = {
        "attn_scale": 1 / math.sqrt(sizes.width),
        "use_padding_mask": True,
    }
    softmax |= {"seq_len_q": tensors["lengths"], "seq_len_kv": tensors["lengths"]}
    if sizes.dropout:
        softmax["dropout"] = sizes.dropout, tensors["seed"], tensors["offset"]
    parts = {name: declare(name) for name in ("q", "k", "v")}
    if backward:
        names: tuple[str, ...] = ("dq", "dk", "dv")
        results = graph.sdpa_backward(
            **parts,
            o=declare("context"),
            dO=declare("gradient"),
            stats=declare("sums"),
            max_total_seq_len_q=sizes.num_tokens,
            max_total_seq_len_kv=sizes.num_tokens,
            **softmax,
        )
    else:
        names = ("context", "sums")
        results = graph.sdpa(**parts, is_inference=False, **softmax)
    for name, result in zip(names, results, strict=True):
        declare(name, result)
    graph.validate()
    graph.build_operation_graph()
    # Mode A ranks plans by expected speed; FALLBACK has some where A has none.
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    return Graph(graph, tensors)


def _shared_tensors(graph: Any, sizes: Sizes, types: Any) -> dict[str, Any]:
    """Vectors that describe the sequences, and dropout's random numbers."""
    shared = {
        "packed_offsets": (sizes.num_sequences + 1, types.INT32),
        "context_offsets": (sizes.num_sequences + 1, types.INT32),
        "lengths": (sizes.num_sequences, types.INT32),
    }
    if sizes.dropout:
        shared |= {"seed": (1, types.INT64), "offset": (1, types.INT64)}
    return {
        name: graph.tensor(
            name=name, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind
        )
        for name, (count, kind) in shared.items()
    }


def _form(name: str, sizes: Sizes, types: Any) -> tuple[list[int], list[int], Any, str]:
    """Shape [S, N, longest, H or 1], strides, type, and the name of a ragged tensor's offsets."""
    batch, heads, longest = sizes.num_sequences, sizes.num_heads, sizes.longest
    if name == "sums":
        return (
            [batch, heads, longest, 1],
            [heads * longest, longest, 1, 1],
            types.FLOAT,
            "",
        )
    row, offsets = heads * sizes.width, "context_offsets"
    if name not in ("context", "gradient"):
        row, offsets = 3 * row, "packed_offsets"
    kind = types.BFLOAT16 if sizes.dtype == torch.bfloat16 else types.HALF
    shape = [batch, heads, longest, sizes.width]
    return shape, [longest * row, sizes.width, row, 1], kind, offsets


class Plans:
    """Both passes for one size of batch on one GPU, compiled."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.handle = sizes, _handle(device)
        self.forward, self.backward = (
            make_graph(sizes, backward=backward, handle=self.handle)
            for backward in (False, True)
        )
        for graph, _ in (self.forward, self.backward):
            graph.build_plans()
        self.tried = False  # whether both passes have run

    def run(self, graph: Graph, given: dict[str, Tensor]) -> None:
        """Launches a pass on the named tensors, inputs and outputs, on the current stream."""
        device = given["lengths"].device
        if device.type == "cuda":
            # Within a capture the current stream is another one than the handle was made with.
            importlib.import_module("cudnn").set_stream(
                self.handle, torch.cuda.current_stream(device).cuda_stream
            )
        # From PyTorch's allocator: within a capture it belongs to the graph.
        workspace = torch.empty(
            max(1, graph.graph.get_workspace_size()), dtype=torch.uint8, device=device
        )
        operands = {
            tensor: given[name].detach() for name, tensor in graph.tensors.items()
        }
        graph.graph.execute(operands, workspace, handle=self.handle)


@functools.cache
def _handle(device: torch.device) -> Any:
    cudnn = importlib.import_module("cudnn")
    if device.type != "cuda":
        return cudnn.create_handle()
    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.lru_cache(maxsize=MOST_PLANS)
def _plans(sizes: Sizes, device: torch.device) -> Plans:
    try:
        return Plans(sizes, device)
    except Exception as error:  # any error of the library
        reason = one_line(root_cause(error))
        raise ConfigError(
            f"ATTENTION=cudnn_frontend: no plan for {sizes}: {reason}; use auto"
        ) from error


# Of passes in CUDA graphs, kept for good: a replay goes on using them, which the cache does not see.
_captured: set[Plans] = set()


def _offsets(forward_pass: ForwardPass, sizes: Sizes) -> dict[str, Tensor]:
    """Lengths, and offsets in elements of packed projections and contexts; computed once a forward
    pass.
    """
    once, cu_seqlens = forward_pass.once, forward_pass.cu_seqlens
    row = sizes.num_heads * sizes.width
    assert sizes.num_tokens * 3 * row < 2**31, "offsets are int32"
    return {
        "lengths": once(("cudnn", "lengths"), cu_seqlens.diff),
        "packed_offsets": once(("cudnn", 3 * row), lambda: cu_seqlens * (3 * row)),
        "context_offsets": once(("cudnn", row), lambda: cu_seqlens * row),
    }


def _seeds(forward_pass: ForwardPass, dropout: float) -> dict[str, Tensor]:
    """Seed and offset of the next site, each aligned to 16 bytes."""
    drop = forward_pass.sites.next(dropout)
    block, number = divmod(drop.site, SITES)
    seed = drop.seed
    assert seed is not None

    def make() -> Tensor:
        # Four numbers a site, seed first and offset third: 16 bytes apart, the offset 0.
        seeds = torch.zeros(SITES, 4, dtype=torch.int64, device=seed.device)
        numbers = torch.arange(block * SITES, (block + 1) * SITES, device=seed.device)
        seeds[:, 0] = numbers * SEED_STEP + seed
        return seeds

    # One launch for the seeds of many layers.
    seeds = forward_pass.once(("cudnn", "seeds", block), make)[number]
    return {"seed": seeds[:1], "offset": seeds[2:3]}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, plans: Plans, shared: dict[str, Tensor]
    ) -> Tensor:
        qkv = qkv.contiguous()
        sizes = plans.sizes
        # Not ragged: (S, N, longest).
        rows = sizes.num_sequences * sizes.num_heads * sizes.longest
        sums = torch.empty(rows, dtype=torch.float32, device=qkv.device)
        context = qkv.new_empty(sizes.num_tokens, sizes.num_heads, sizes.width)
        q, k, v = qkv.unbind(1)
        plans.run(
            plans.forward,
            {"q": q, "k": k, "v": v, "context": context, "sums": sums, **shared},
        )
        ctx.names, ctx.plans = list(shared), plans
        ctx.save_for_backward(qkv, context, sums, *shared.values())
        if not plans.tried:  # so that errors of the backward pass come now, while another backend can take over
            _start_backward(plans, context, qkv, context, sums, shared)
            plans.tried = True
        return context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        qkv, context, sums, *values = ctx.saved_tensors
        shared = dict(zip(ctx.names, values, strict=True))
        return (
            _start_backward(
                ctx.plans, gradient.contiguous(), qkv, context, sums, shared
            ),
            None,
            None,
        )


def _start_backward(
    plans: Plans,
    gradient: Tensor,
    qkv: Tensor,
    context: Tensor,
    sums: Tensor,
    shared: dict[str, Tensor],
) -> Tensor:
    qkv_gradient = torch.empty_like(qkv)
    parts = zip(
        ("q", "k", "v", "dq", "dk", "dv"),
        (*qkv.unbind(1), *qkv_gradient.unbind(1)),
        strict=True,
    )
    plans.run(
        plans.backward,
        {
            **dict(parts),
            "context": context,
            "gradient": gradient,
            "sums": sums,
            **shared,
        },
    )
    return qkv_gradient


def attention(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """qkv [T, 3, N, H] in bf16 or fp16 -> context [T, N, H]. Raises ConfigError if cuDNN has no
    plan for the sizes.

    Context and gradient are undefined at tokens beyond cu_seqlens[-1].
    """
    if qkv.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"ATTENTION=cudnn_frontend computes in bf16 or fp16, not in {qkv.dtype}"
        )
    num_tokens, _, num_heads, width = qkv.shape
    sizes = Sizes(
        num_sequences=len(forward_pass.cu_seqlens) - 1,
        longest=forward_pass.max_seqlen,
        num_tokens=num_tokens,
        num_heads=num_heads,
        width=width,
        dtype=qkv.dtype,
        dropout=dropout,
    )
    plans = _plans(sizes, qkv.device)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _captured.add(plans)
    shared = _offsets(forward_pass, sizes) | (
        _seeds(forward_pass, dropout) if dropout else {}
    )
    return _Attention.apply(qkv, plans, shared)
