"""The device that a job is planned for, in numbers that are assumed. Imports no torch.

Only estimates lean on them: nothing of a run does.
"""

from __future__ import annotations

from dataclasses import dataclass

from npu_pipe.train.bounds import between

__all__ = ["ClusterConfig", "check_cluster"]


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What the estimates of plan and of train --dry-run are of; nothing here was measured."""

    name: str = "a device of 64 GiB"
    """For people."""
    memory_gib: float = 64.0
    """Memory of a device."""
    reserve_gib: float = 4.0
    """Part of it that the runtime of the device takes, and gaps between tensors."""
    tflops: float = 75.0
    """Floating-point operations of matrix products in model.precision, 1e12 a second at most."""
    efficiency: float = 0.5
    """Share of that which a model reaches."""
    memory_gb_s: float = 1200.0
    """GB (1e9 bytes) a second that its memory gives."""
    link_gb_s: float = 20.0
    """GB a second between neighbours of the pipeline, one way."""
    link_us: float = 20.0
    """Microseconds that a transfer takes beside."""
    node_gb_s: float = 100.0
    """GB a second that a rank gives all those together that share its layers."""
    ranks_per_node: int = 8
    """Devices of a node."""

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.tflops:g} TFLOPS x {self.efficiency:g}, {self.memory_gb_s:g} GB/s,"
            f" links {self.link_gb_s:g} GB/s + {self.link_us:g} us"
        )


def check_cluster(config: ClusterConfig) -> None:
    """Raise ConfigError for numbers outside their bounds."""
    between(1e-3, 1e6, cluster__memory_gib=config.memory_gib, cluster__tflops=config.tflops)
    between(0, config.memory_gib, cluster__reserve_gib=config.reserve_gib)
    between(1e-3, 1, cluster__efficiency=config.efficiency)
    between(1e-3, 1e6, cluster__memory_gb_s=config.memory_gb_s, cluster__link_gb_s=config.link_gb_s)
    between(0, 1e6, cluster__link_us=config.link_us)
    between(1e-3, 1e6, cluster__node_gb_s=config.node_gb_s)
    between(1, 2**16, cluster__ranks_per_node=config.ranks_per_node)
