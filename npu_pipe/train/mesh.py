"""How many pipelines a job runs, and how many ranks share each stage. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from npu_pipe.errors import ConfigError
from npu_pipe.train.bounds import between
from npu_pipe.train.data import DataConfig
from npu_pipe.train.model_config import ModelConfig

__all__ = ["MeshConfig", "check_mesh"]


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """Ranks beside those along the pipeline: npu_pipe.launch.mesh has the picture."""

    dp: int = 1
    """Replicas of the pipeline, which share data.batch equally."""
    tp: int = 1
    """Ranks that share each matrix of a stage, and the tokens between the matrices."""


def check_mesh(config: MeshConfig, model: ModelConfig, data: DataConfig) -> None:
    """Raise ConfigError for sizes outside their bounds, or that a model cannot be cut into."""
    between(1, 2**16, mesh__dp=config.dp, mesh__tp=config.tp)
    if config.tp == 1:
        return
    if model.experts > 1:
        raise ConfigError(
            "mesh.tp ranks share the matrices of a stage, and experts are not cut that way",
            f"mesh.tp is {config.tp}, model.experts {model.experts}",
            "set mesh.tp = 1, and more pipeline.ranks or mesh.dp",
        )
    shared = {
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads or model.heads,
        "model.hidden": model.hidden,
        "model.vocabulary": model.vocabulary,
        "data.sequence": data.sequence,
    }
    for name, extent in shared.items():
        if extent % config.tp:
            more = -(-extent // config.tp) * config.tp
            raise ConfigError(
                f"mesh.tp ranks share {name} equally",
                f"{name} is {extent}, mesh.tp {config.tp}",
                f"use {name} = {more}, or a mesh.tp that divides it",
            )
