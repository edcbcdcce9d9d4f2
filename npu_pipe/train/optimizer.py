"""AdamW's settings, and the learning rate as a function of the step. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from npu_pipe.train.bounds import at_least, between

__all__ = ["OptimizerConfig", "check_optimizer", "learning_rate"]


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW, linear warm-up and a cosine down to a floor. [Loshchilov & Hutter 1711.05101]"""

    learning_rate: float = 3e-3
    """The peak, reached at the end of the warm-up."""
    floor: float = 0.1
    """The last learning rate, as a share of the peak."""
    warmup_steps: int = 20
    """Steps of linear rise."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients."""
    epsilon: float = 1e-8
    """Added to the root of the mean of squares."""
    weight_decay: float = 0.1
    """Decay of matrices; vectors have none."""
    clip_norm: float = 1.0
    """Largest norm of the gradient over all stages."""


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise ConfigError for settings outside their bounds."""
    at_least(
        0,
        optimizer__learning_rate=config.learning_rate,
        optimizer__warmup_steps=config.warmup_steps,
        optimizer__weight_decay=config.weight_decay,
    )
    at_least(1e-30, optimizer__epsilon=config.epsilon, optimizer__clip_norm=config.clip_norm)
    between(0, 1, optimizer__floor=config.floor)
    between(0, 0.999999, optimizer__beta1=config.beta1, optimizer__beta2=config.beta2)


def learning_rate(config: OptimizerConfig, step: int, *, steps: int) -> float:
    """The learning rate of update `step` (1..steps)."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(steps - config.warmup_steps, 1)
    cosine = (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return config.learning_rate * (config.floor + (1 - config.floor) * cosine)
