"""The gradients of a rank's modules, and their norm."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

__all__ = ["gradients_of", "square_norm"]


def gradients_of(modules: Iterable[nn.Module], *, without: Collection[int] = ()) -> list[Tensor]:
    """One for each parameter that has one; a parameter that modules share is there once.

    without: the ids of parameters to leave out.
    """
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return [p.grad for i, p in parameters.items() if p.grad is not None and i not in without]


def square_norm(gradients: Iterable[Tensor]) -> float:
    """The square of their joint 2-norm, summed in double precision."""
    squares = (_real(gradient.detach()).double().square().sum() for gradient in gradients)
    return float(sum(squares, start=torch.zeros((), dtype=torch.float64)))


def _real(gradient: Tensor) -> Tensor:
    return gradient.abs() if gradient.is_complex() else gradient
