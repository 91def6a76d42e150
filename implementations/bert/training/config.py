"""Device-dependent settings, shared by all tasks: ranks, kernels, precision, graph and
optimizer.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from bert.core.dist import DistConfig, pick_device
from bert.core.extension import ExtensionConfig
from bert.kernels import KernelsConfig, attention
from bert.kernels.precision import Precision, PrecisionConfig
from bert.model.recompute import Recomputation, RecomputeConfig
from bert.optim import OptimizerConfig
from bert.training.graph import GraphConfig
from common.env import ConfigError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The device-dependent part of a task's Config."""

    dist: DistConfig = DistConfig()
    kernels: KernelsConfig = KernelsConfig()
    precision: PrecisionConfig = PrecisionConfig()
    graph: GraphConfig = GraphConfig()
    optim: OptimizerConfig = OptimizerConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    extension: ExtensionConfig = ExtensionConfig()

    @cached_property
    def device(self) -> torch.device:
        return pick_device(self.dist)

    @cached_property
    def numerics(self) -> Precision:
        return self.precision.resolve(self.device)

    @property
    def recomputes_in_graph(self) -> bool:
        """Whether every dropout of a layer can be repeated in a CUDA graph."""
        # These draw masks from a seed and a site, which a second run of a layer can repeat.
        fused = "dropout_add_layer_norm" in self.kernels.names(self.device)
        return self.kernels.attention in ("triton", "cudnn_frontend") and fused

    def recomputation(self, *, uses_graph: bool) -> Recomputation | None:
        """Activation recomputation of the model, if any."""
        layers = self.recompute.layers
        # In a graph a generator's state cannot be read; outside of one PyTorch's dropout needs it.
        return Recomputation(layers, random_state=not uses_graph) if layers else None

    def check_device(self, *, uses_graph: bool) -> None:
        """Raises ConfigError for what this machine's device cannot do. Requires ``dist.check()``
        first.
        """
        self.precision.check(self.device)
        dtype = self.numerics.dtype
        self.optim.check(self.device)
        # For its error alone; the number is computed where it is used.
        self.optim.group_size(self.dist.world_size, self.dist.ranks_per_node)
        attention.check(self.kernels.attention, self.device, dtype, uses_graph)
        if uses_graph and not self.optim.rule_class.capturable:
            raise ConfigError(
                f"OPTIMIZER={self.optim.optimizer} takes steps on the host, outside of CUDA graphs: set CUDA_GRAPH=0"
            )
        if uses_graph and self.recompute.layers and not self.recomputes_in_graph:
            raise ConfigError(
                "RECOMPUTE_LAYERS in a CUDA graph needs our own dropout: "
                "set ATTENTION=triton or cudnn_frontend, and FUSED=auto, or CUDA_GRAPH=0"
            )
        if not self.graph.cuda_graph:
            return
        if self.device.type != "cuda":
            raise ConfigError("CUDA_GRAPH=1 needs a GPU: leave it unset on a CPU")
        # auto in fp32 means sdpa_loop, which reads lengths on the host.
        if dtype == torch.float32 and self.kernels.attention == "auto":
            raise ConfigError("CUDA_GRAPH=1 with PRECISION=fp32 needs ATTENTION=triton")
