"""One AdamW over all stages of a rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from npu_pipe.train.optimizer import OptimizerConfig

__all__ = ["build_adamw", "set_learning_rate"]


def build_adamw(config: OptimizerConfig, stages: Iterable[nn.Module]) -> torch.optim.AdamW:
    """The optimizer of these stages: matrices decay, vectors (the gains of norms) do not."""
    parameters = [p for stage in stages for p in stage.parameters()]
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [(matrices, config.weight_decay), (vectors, 0.0)]
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in groups if group],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of the next step for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = value
