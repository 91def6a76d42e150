"""A GPU in name, for whole scripts on a build of PyTorch for CPUs: tensors on cuda:0.

They compute on the CPU, but to all of PyTorch they are CUDA's. As there, tensors of two devices do
not mix; a stream that captures runs nothing, keeps what is launched, and refuses what would wait
for it; graphs, pools and streams go by the rules of STAND_IN_TORCH (cuda_rules.py), within PyTorch's
own torch.cuda.graph; a replay repeats the operations in the same memory, with new random numbers.
Unlike there, everything is done at once, and there is no Triton.
stand_in_gpu.cpp must have been loaded before.
"""

import itertools
import math
import os
import sys
import time
from importlib.machinery import PathFinder
from types import SimpleNamespace

import cuda_rules
import torch
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

aten = torch.ops.aten
GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
MIXED = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
COPIES = {aten.copy_.default, aten._to_copy.default}
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}
SET = aten.set_.source_Storage_storage_offset
LAUNCH_NOTHING = ("aten::empty", "aten::new_empty", "aten::set_")


class GpuTensor(torch.Tensor):
    """``host`` has its numbers."""

    @staticmethod
    def __new__(cls, host):
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, device=GPU,
        )  # fmt: skip
        made.host = host
        return made

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.host = other.host

    def untyped_storage(self):
        found = super().untyped_storage()
        found.host = self.host.untyped_storage()
        return found

    def tolist(self):
        return self.cpu().tolist()

    def __format__(self, how):
        return format(self.host, how)

    def __repr__(self):
        return f"{self.host!r} on {GPU}"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return launched(function, args, kwargs or {})


class Device(TorchDispatchMode):
    """Of a thread: where tensors are made on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return launched(function, args, kwargs or {})


def launched(function, args, kwargs):
    """Calls an operation of PyTorch, whose tensors may lie on the device."""
    given = tensors_in((args, kwargs))
    ours = [tensor for tensor in given if isinstance(tensor, GpuTensor)]
    asked = kwargs.get("device")
    on_device = bool(ours) if asked is None else torch.device(asked).type == "cuda"
    if function is aten.copy_.default:
        on_device = isinstance(args[0], GpuTensor)
    if not ours and not on_device:
        return ON_HOST.get(function, function)(*args, **kwargs)
    copies = function in COPIES
    # A number that lies on the host goes along with a launch.
    others = [tensor for tensor in given if not isinstance(tensor, GpuTensor)]
    foreign = [tensor for tensor in others if tensor.ndim or copies]
    if ours and foreign and not copies:
        raise RuntimeError(MIXED)
    run = ON_DEVICE.get(function, function)
    host_args, host_kwargs = tree_map(on_host, (args, kwargs))
    if (graph := cuda.stream.graph) is None:
        if torch.Tag.nondeterministic_seeded in function.tags:
            cuda.generator.check()
        result = run(*host_args, **host_kwargs)
    else:
        pageable = not all(hasattr(one, "pinned") for one in foreign)
        graph.permit(on_device and function not in READS and not pageable)
        cuda.call("launch")
        result = graph.keep(function, run, host_args, host_kwargs)
    if not on_device:
        return result
    known = {id(one.host): one for one in ours}  # of what is changed in place
    wrapped = lambda one: known[id(one)] if id(one) in known else GpuTensor(one)  # noqa: E731
    made = tree_map_only(torch.Tensor, wrapped, result)
    cuda.allocated([one for one in tensors_in(made) if id(one.host) not in known])
    if not ours or run is not function:
        return made
    return return_and_correct_aliasing(function, args, kwargs, made)


def tensors_in(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def on_host(value):
    if isinstance(value, GpuTensor | torch.UntypedStorage):
        return value.host
    if isinstance(value, torch.device):
        return HOST if value.type == "cuda" else value
    # A number that goes along with a launch is what it was then.
    is_number = isinstance(value, torch.Tensor) and not value.ndim
    return value.clone() if is_number else value


def sequences(qkv, offsets, dropout, seed):
    """Of each sequence its slice, operands [N, L, H], probabilities [N, L, L] and their dropout."""
    generator = torch.Generator().manual_seed(int(seed))
    for begin, end in itertools.pairwise(offsets.tolist()):
        q, k, v = (part[begin:end].float().transpose(0, 1) for part in qkv)
        p = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
        kept = torch.rand(p.shape, generator=generator) >= dropout
        yield slice(begin, end), (q, k, v), p, kept / (1 - dropout)


def flash_forward(query, key, value, offsets, _, *rest, **__):
    seed = torch.randint(2**31, (1,))
    output = torch.full_like(query, math.nan)  # also beyond the sequences
    given = sequences((query, key, value), offsets, rest[2], seed)
    for place, (_, _, v), p, kept in given:
        output[place] = ((p * kept) @ v).transpose(0, 1).to(output.dtype)
    return output, seed.float(), seed, seed.clone(), seed.clone()


def flash_backward(gradient, query, key, value, *rest, **_):
    offsets, dropout, seed = rest[2], rest[6], rest[8]
    found = [torch.full_like(one, math.nan) for one in (query, key, value)]
    given = sequences((query, key, value), offsets, dropout, seed)
    for place, (q, k, v), p, kept in given:
        do = gradient[place].float().transpose(0, 1)
        dp = (do @ v.mT) * kept
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        parts = ds @ k, ds.mT @ q, (p * kept).mT @ do
        for one, part in zip(found, parts, strict=True):
            one[place] = part.transpose(0, 1).to(one.dtype)
    return tuple(found)


def scaled_product(
    a, b, a_scale, b_scale, bias=None, _=None, out_dtype=None, fast=False, out=None
):
    assert torch.cuda.get_device_capability() >= (8, 9), "no such hardware"
    # As the hardware wants it.
    assert all(size % 16 == 0 for size in (*a.shape, b.shape[1]))
    y = (a.float() @ b.float()) * (a_scale * b_scale)
    y = (y if bias is None else y + bias).to(out_dtype)
    return y if out is None else out.copy_(y)


def product(a, b):
    """Of a benchmark's at real size nothing is computed."""
    is_large = a.numel() * b.shape[1] >= 1e9
    return a.new_empty(len(a), b.shape[1]) if is_large else aten.mm.default(a, b)


def pin(tensor, *_):
    made = tensor.clone()
    made.pinned = True
    return made


ON_HOST = {
    aten.is_pinned.default: lambda tensor, *_: hasattr(tensor, "pinned"),
    aten._pin_memory.default: pin,
}
ON_DEVICE = {
    aten._flash_attention_forward.default: flash_forward,
    aten._flash_attention_backward.default: flash_backward,
    aten._scaled_mm.default: scaled_product,
    aten._scaled_mm.out: scaled_product,
    aten.mm.default: product,
    aten.mm.dtype: lambda a, b, dtype: (a.float() @ b.float()).to(dtype),
    aten.addmm.dtype_out: lambda c, a, b, dtype, out: out.copy_(c + a.float() @ b.float()),
    aten._fused_sdp_choice.default: lambda *_, **__: 0,  # written out
}  # fmt: skip


class Event(cuda_rules.Event):
    def __init__(self, cuda, enable_timing=False):
        super().__init__(cuda)
        self.timed, self.moment = enable_timing, None

    def record(self, stream=None):
        super().record(stream)
        self.moment = time.perf_counter()

    def elapsed_time(self, later):
        if not (self.timed and later.timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")  # fmt: skip
        return 1e3 * (later.moment - self.moment)


class CUDAGraph(cuda_rules.CUDAGraph):
    """What a capture kept, in order. changed, made: tensors by their memory's place."""

    def __init__(self, cuda):
        self.operations, self.changed, self.made = [], {}, {}
        super().__init__(cuda)

    def stopped(self, kept):
        if not kept:
            self.operations.clear()
        # Nothing has run: what was there is as it was, what is new has no numbers yet.
        for tensor, before in self.changed.values():
            tensor.copy_(before)
        for memory, tensor in self.made.items():
            has_nan = tensor.is_floating_point() and tensor.element_size() > 1
            if has_nan and place(tensor) == memory:  # not set to other memory since
                tensor.fill_(math.nan)
        self.changed.clear()
        self.made.clear()

    def keep(self, function, run, args, kwargs):
        """Keeps an operation. It runs all the same, for the shapes of its results."""
        given = tensors_in((args, kwargs))
        launches = not (
            function.is_view or function._schema.name.startswith(LAUNCH_NOTHING)
        )
        if launches and function._schema.is_mutable:
            for tensor in given:
                if place(tensor) not in self.made and place(tensor) not in self.changed:
                    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
                    self.changed[place(tensor)] = whole, whole.clone()
        result = run(*args, **kwargs)
        found, there = tensors_in(result), [*map(place, given)]
        if function is not SET:
            self.made |= {place(one): one for one in found if place(one) not in there}
        if launches:
            self.operations.append((run, args, kwargs, found))
        return result

    def launch(self):
        for run, args, kwargs, found in self.operations:
            again = tensors_in(run(*args, **kwargs))
            for before, after in zip(found, again, strict=True):
                if before is not after:
                    before.copy_(after)


def place(tensor):
    return tensor.untyped_storage().data_ptr()


cuda = cuda_rules.Cuda(os.environ.get("STAND_IN_TORCH", "2.13"))
cuda.abort = lambda why: (print(why, file=sys.stderr), os.abort())


def profile(*, activities, its=torch.profiler.profile):
    """Of the CPU."""
    assert activities == [ProfilerActivity.CUDA]
    return its(activities=[ProfilerActivity.CPU])


CAPABILITY = os.environ.get("STAND_IN_CAPABILITY", "9.0")
STATED = {
    "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
    "get_device_name": "NVIDIA stand-in", "get_device_capability": tuple(map(int, CAPABILITY.split("."))),
    "get_device_properties": SimpleNamespace(multi_processor_count=132),
    "mem_get_info": (2**35, 2**36), "max_memory_allocated": 2**30,
    "init": None, "set_device": None, "reset_peak_memory_stats": None,
}  # fmt: skip
REPLACED = {
    **cuda.installed(CUDAGraph, Event),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda found, device=None: torch.set_rng_state(found),
    "default_generators": (cuda.generator,),
}


def install():
    """From here on this process sees the GPU."""
    find = PathFinder.find_spec.__func__
    without = lambda cls, name, *rest: None if name == "triton" else find(cls, name, *rest)  # noqa: E731  # fmt: skip
    PathFinder.find_spec = classmethod(without)
    for name, value in STATED.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    for name, value in REPLACED.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True
    torch.backends.cuda.is_flash_attention_available = lambda: True
    torch.profiler.profile = profile
    torch.compile = lambda model: model
    for name, value in cuda.private().items():
        setattr(torch._C, name, value)
    # torch.tensor goes to the device by a copy. Module.to makes new parameters, as those of the
    # host cannot become tensors of this class. Threads of autograd would not see the device.
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.autograd.set_multithreading_enabled(False).__enter__()
    Device().__enter__()
    from bert.kernels.attention import benchmark

    # Trials take seconds.
    benchmark.LENGTHS, benchmark.NUM_REPEATS = (48, 33, 40, 56), 1
