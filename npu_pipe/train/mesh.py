"""How many pipelines a job runs, and on which ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from npu_pipe.errors import ConfigError
from npu_pipe.train.bounds import between

__all__ = ["MeshConfig", "check_mesh"]


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """Ranks beside those along the pipeline: npu_pipe.launch.mesh has the picture."""

    dp: int = 1
    """Replicas of the pipeline, which share data.batch equally."""
    tp: int = 1
    """Ranks that share the matrices of a stage; this model's are not cut, so 1."""


def check_mesh(config: MeshConfig) -> None:
    """Raise ConfigError for sizes outside their bounds, or that the model cannot be cut into."""
    between(1, 2**16, mesh__dp=config.dp, mesh__tp=config.tp)
    if config.tp > 1:
        raise ConfigError(
            "mesh.tp ranks share the matrices of a stage, and the model of npu-pipe train is not "
            "cut that way",
            f"mesh.tp is {config.tp}",
            "set mesh.tp = 1, and more pipeline.ranks or mesh.dp",
        )
