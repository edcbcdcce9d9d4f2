"""The gradients of a rank's modules: their form, and their norm."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

__all__ = ["counted_once", "gradient_dtype", "gradients_of", "square_norm", "zero_gradient"]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """What its gradient has or would have: a weight in half precision may collect in float32."""
    if parameter.grad is not None:
        return parameter.grad.dtype
    return parameter.grad_dtype or parameter.dtype


def zero_gradient(parameter: Tensor) -> Tensor:
    """For one that has no gradient where other ranks have."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))


def gradients_of(modules: Iterable[nn.Module], *, without: Collection[int] = ()) -> list[Tensor]:
    """One for each parameter that has one; a parameter that modules share is there once.

    without: the ids of parameters to leave out.
    """
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return [p.grad for i, p in parameters.items() if p.grad is not None and i not in without]


def counted_once(
    modules: Mapping[int, nn.Module], *, placement: Sequence[int], rank: int
) -> tuple[list[nn.Module], frozenset[int]]:
    """What a rank counts in a norm over all ranks: of its modules by stage those to take, and the
    ids of the parameters to leave out.

    Of two replicas of a stage the first counts, which `placement` names, and of what stages share
    the first stage's.
    """
    first: dict[int, int] = {}
    for stage in sorted(modules, reverse=True):
        first |= {id(parameter): stage for parameter in modules[stage].parameters()}
    elsewhere = frozenset(i for i, stage in first.items() if placement[stage] != rank)
    return [module for stage, module in modules.items() if placement[stage] == rank], elsewhere


def square_norm(gradients: Iterable[Tensor], *, digits: torch.dtype = torch.float64) -> float:
    """The square of their joint 2-norm.

    digits: the type in which each gradient is summed, the widest that its device has; their sums
    are added in double precision.
    """
    norms = [vector_norm(_wide(gradient.detach(), digits)) for gradient in gradients]
    if not norms:
        return 0.0
    return float(torch.stack(norms).cpu().double().square().sum())


def _wide(gradient: Tensor, digits: torch.dtype) -> Tensor:
    real = gradient.abs() if gradient.is_complex() else gradient
    return real.to(torch.promote_types(real.dtype, digits))
