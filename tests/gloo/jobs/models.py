"""Small models for jobs, the same on every rank: stage i is made from seed i."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def stage(index: int, width: int = 6) -> nn.Module:
    generator = torch.Generator().manual_seed(index)
    linear = nn.Linear(width, width, dtype=torch.float64)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / width**0.5
            )
    return nn.Sequential(linear, nn.Tanh())


def data(rows: int, width: int = 6, seed: int = 1000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, rows, width)
    inputs, targets = torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs, targets


def gradients(modules: Sequence[nn.Module]) -> list[Tensor]:
    """All gradients, and None is not among them."""
    found = [parameter.grad for module in modules for parameter in module.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]
