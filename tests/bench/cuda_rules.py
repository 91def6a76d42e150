"""PyTorch's rules for CUDA graphs, the pools of its allocators, streams and generators, by version.

Restated from aten/src/ATen/cuda/CUDAGraph.cpp (capture_begin, capture_end, instantiate, reset, the
destructor), c10/cuda/CUDACachingAllocator.cpp (beginAllocateToPool, endAllocateToPool, releasePool,
release_cached_blocks) and aten/src/ATen/cuda/CUDAGeneratorImpl.cpp (increase, capture_epilogue,
remove_capture_state). The flags of Rules are what differs between the versions.

Each call of a library is counted, and one of them can be made to fail.
"""

import itertools
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

INJECTED = "injected failure of"
BROKEN = "CUDA error: operation failed due to a previous error during capture"
REFUSED = "CUDA error: operation not permitted when stream is capturing"


@dataclass(frozen=True)
class Rules:
    """ends_pools: CUDAGraph::capture_end ends allocations to the pools before it looks at the status of
    cudaStreamEndCapture. releases: CUDAGraph::reset releases the pool of a capture that failed (``allocated_pool_``),
    not only of one that ended (``capture_ended_``). catches: the destructor logs what reset throws, which else ends the
    process. by_capture: a generator keeps a state by capture, else one flag that a failed capture leaves set.
    has_hooks: they run within CUDAGraph.capture_begin of torch/cuda/graphs.py, once the capture is under way.
    """

    ends_pools: bool
    releases: bool
    catches: bool
    by_capture: bool
    has_hooks: bool


VERSIONS = {
    "2.9": Rules(False, False, False, False, False),
    "2.12": Rules(False, False, False, True, False),
    "2.13": Rules(True, False, False, True, False),
    "2.14": Rules(True, True, False, True, True),
    "2.15": Rules(True, True, True, True, True),
}


@dataclass
class Pool:
    """Private memory of graphs. uses: of captures and graphs; blocks: its tensors, a segment each,
    which are free once nobody refers to them.
    """

    uses: int = 0
    blocks: list[weakref.ref] = field(default_factory=list)


class Stream:
    """graph: what captures it."""

    device, device_index = torch.device("cuda", 0), 0

    def __init__(self, cuda):
        self.cuda, self.graph = cuda, None

    def wait_stream(self, other):
        self.cuda.call("cudaStreamWaitEvent")

    wait_event = wait_stream


class StreamContext:
    """torch.cuda.stream. Left open where torch.cuda.graph does not come to leave it."""

    def __init__(self, cuda, stream):
        self.cuda, self.stream = cuda, stream

    def __enter__(self):
        self.before, self.cuda.stream = self.cuda.stream, self.stream

    def __exit__(self, *_):
        self.cuda.stream = self.before


class Event:
    """captured: recorded in a capture, which no host can wait for."""

    def __init__(self, cuda):
        self.cuda, self.captured = cuda, False

    def record(self, stream=None):
        self.cuda.call("cudaEventRecord")
        self.captured = (stream or self.cuda.stream).graph is not None

    def query(self):
        self.cuda.call("cudaEventQuery")
        self.cuda.forbid_in_capture()
        if self.captured:
            raise RuntimeError("CUDA error: operation not permitted on captured event")
        return True

    synchronize = query


class Generator:
    """The random numbers: those of the CPU. Has a state that can be exchanged. A graph draws for good from the one that
    was current when it was captured, whereas seeds reach the one that is current now.
    """

    def __init__(self, cuda):
        self.cuda = cuda
        self.state = SimpleNamespace(capturing=False, numbers=None)

    def graphsafe_get_state(self):
        self.cuda.call("graphsafe_get_state")
        return self.state

    def clone_state(self):
        self.cuda.call("clone_state")
        return SimpleNamespace(capturing=False, numbers=torch.get_rng_state())

    def graphsafe_set_state(self, state):
        self.cuda.call("graphsafe_set_state")
        self.exchange(state)

    def exchange(self, state):
        if state is not self.state:
            self.state.numbers = torch.get_rng_state()
            torch.set_rng_state(state.numbers)
        self.state = state

    def check(self):
        """Before eager work that draws."""
        if self.state.capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")  # fmt: skip


class CUDAGraph:
    """Subclasses keep and launch the work: started(), stopped(kept), launch().

    unclosed, by reset's rules: the pool is used; allocations go there.
    """

    def __init__(self, cuda):
        self.cuda, self.pool_id, self.random = cuda, None, None
        self.ended = self.instantiated = self.invalid = False
        self.uses_pool = self.allocates = False

    def started(self):
        pass

    def stopped(self, kept):
        pass

    def capture_begin(self, pool=None, **_):
        cuda, stream = self.cuda, self.cuda.stream
        if stream is cuda.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.pool_id, self.stream = pool or cuda.new_pool(), stream
        cuda.begin_allocations(self)
        self.uses_pool = self.allocates = cuda.rules.releases
        cuda.call("cudaStreamBeginCapture")
        if stream.graph is not None:
            raise RuntimeError("CUDA error: operation not permitted")
        stream.graph = self
        self.random = cuda.generator.state
        self.random.capturing = not cuda.rules.by_capture
        self.started()
        if cuda.rules.has_hooks:
            cuda.call("capture hooks")

    def capture_end(self):
        cuda = self.cuda
        if cuda.stream is not self.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        failed = BROKEN if self.invalid else ""
        if self.stream.graph is not self:
            failed = "CUDA error: operation not permitted"
        try:
            cuda.call("cudaStreamEndCapture")
        except RuntimeError as error:
            failed = str(error)
        if self.stream.graph is self:
            self.stream.graph = None
            self.stopped(not failed)
        if failed and not cuda.rules.ends_pools:
            raise RuntimeError(failed)
        cuda.end_allocations(0, self.pool_id)
        cuda.host_filters.pop(self.pool_id)
        self.allocates = False
        if failed:
            raise RuntimeError(failed)
        self.random.capturing = False
        cuda.call("cudaGraphGetNodes")
        self.ended = True
        cuda.call("cudaGraphInstantiateWithFlags")
        self.instantiated = True
        cuda.call("cudaGraphDestroy")

    def pool(self):
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")  # fmt: skip
        return self.pool_id

    def permit(self, allowed):
        if not allowed:
            self.invalid = True
            raise RuntimeError(REFUSED)

    def replay(self):
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::replay without a preceding capture.")
        self.cuda.call("cudaGraphLaunch")
        generator = self.cuda.generator
        current = generator.state
        generator.exchange(self.random)
        try:
            self.launch()
        finally:
            generator.exchange(current)

    def reset(self):
        self.cuda.call("CUDAGraph::reset")
        self.clean_up()

    def clean_up(self):
        self.stopped(kept=False)
        if self.uses_pool or self.ended:
            if self.allocates:
                self.cuda.end_allocations(0, self.pool_id)
                self.cuda.host_filters.pop(self.pool_id)
                self.allocates = False
            # Before the count: a second reset has nothing to release.
            self.uses_pool = self.ended = False
            self.cuda.count_down(self.pool_id)

    def __del__(self):
        if not hasattr(self, "cuda"):  # the constructor has failed
            return
        try:
            self.clean_up()
        except RuntimeError as error:
            if not self.cuda.rules.catches:
                self.cuda.abort(str(error))


class Cuda:
    """What a process sees of the libraries. fail_at: the number of the call that fails; calls: the names of all."""

    def __init__(self, version="2.13"):
        self.rules = VERSIONS[version]
        self.calls, self.fail_at, self.aborted = [], None, []
        self.default = self.stream = Stream(self)
        self.generator = Generator(self)
        # Allocations go there; the host's allocator asks the graph, by an address.
        self.pools, self.open, self.host_filters = {}, [], {}
        self.handles = itertools.count(1)

    def call(self, name):
        self.calls.append(name)
        if len(self.calls) == self.fail_at:
            raise RuntimeError(f"{INJECTED} {name}")

    def abort(self, why):
        self.aborted.append(why)

    def new_pool(self):
        return 0, next(self.handles)

    def begin_allocations(self, graph):
        pool = self.pools.setdefault(graph.pool_id, Pool())
        if pool.blocks and not pool.uses:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        pool.uses += 1
        if graph.pool_id in self.open:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.open.append(graph.pool_id)
        self.host_filters[graph.pool_id] = weakref.ref(graph)

    def end_allocations(self, _, pool):
        if pool not in self.open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.open.remove(pool)

    def release_pool(self, _, pool):
        self.call("releasePool")
        self.count_down(pool)

    def count_down(self, pool):
        if pool not in self.pools:
            raise RuntimeError("get_private_pool INTERNAL ASSERT FAILED")
        self.pools[pool].uses -= 1
        if self.pools[pool].uses < 0:
            raise RuntimeError("uc >= 0 INTERNAL ASSERT FAILED")

    def empty_cache(self):
        self.call("emptyCache")
        if self.open:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        for name, pool in list(self.pools.items()):
            if pool.uses < 0:
                raise RuntimeError("use_count == 0 INTERNAL ASSERT FAILED")
            if not pool.uses:
                pool.blocks = [block for block in pool.blocks if block() is not None]
                if not pool.blocks:
                    del self.pools[name]

    def snapshot(self):
        self.call("memorySnapshot")
        return [
            {"segment_pool_id": name, "active_size": int(block() is not None)}
            for name, pool in self.pools.items()
            for block in pool.blocks
        ]

    def allocated(self, tensors):
        """By a capture."""
        if self.stream.graph is not None:
            pool = self.pools[self.stream.graph.pool_id]
            pool.blocks += [weakref.ref(tensor) for tensor in tensors]

    def forbid_in_capture(self):
        """What would wait for a stream that captures, or for the device meanwhile."""
        if self.stream.graph is not None:
            self.stream.graph.permit(False)

    def synchronize(self, device=None):
        self.call("cudaDeviceSynchronize")
        self.forbid_in_capture()

    def set_stream(self, stream):
        self.stream = stream

    def on(self, stream):
        return StreamContext(self, stream)

    def faults(self):
        """What must never be: by name."""
        reserved = [pool for pool in self.pools.values() if pool.blocks]
        dangling = [graph for graph in self.host_filters.values() if graph() is None]
        return {
            "aborts": self.aborted,
            "open": list(self.open),
            "leaks": [pool for pool in reserved if pool.uses > 0],
            "released twice": [pool for pool in self.pools.values() if pool.uses < 0],
            "dangling": dangling,
            "stream": [self.stream] if self.stream is not self.default else [],
            "capturing": [self.generator.state] * self.generator.state.capturing,
        }

    def installed(self, graph_class, event_class=Event):
        """Attributes of torch.cuda, by name."""
        return {
            "Stream": self._kind(Stream),
            "Event": self._kind(event_class),
            "CUDAGraph": self._kind(graph_class),
            "current_stream": lambda device=None: self.stream,
            "set_stream": self.set_stream,
            "stream": self.on,
            "synchronize": self.synchronize,
            "empty_cache": self.empty_cache,
            "memory_snapshot": self.snapshot,
            "graph_pool_handle": self.new_pool,
            "is_current_stream_capturing": lambda: self.stream.graph is not None,
        }

    def private(self):
        """Attributes of torch._C."""
        return {
            "_cuda_endAllocateToPool": self.end_allocations,
            "_cuda_releasePool": self.release_pool,
            "_host_emptyCache": lambda: None,
        }

    def _kind(self, kind):
        """The class, of this process."""

        def made(one, *arguments, **settings):
            self.call(kind.__name__)
            kind.__init__(one, self, **settings)

        return type(kind.__name__, (kind,), {"__init__": made})
