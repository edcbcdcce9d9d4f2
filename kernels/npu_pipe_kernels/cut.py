"""Cut: what a stage shares with other ranks, and its part of a norm over all of them.

cut parameters      each rank has a part: their squares are summed over the ranks
whole parameters    each rank has the same: those of one rank count
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import nn

from npu_pipe.errors import ConfigError
from npu_pipe.ops.ranks import Ranks
from npu_pipe.runtime.digest import digest_of
from npu_pipe.runtime.gradients import gradients_of, square_norm
from npu_pipe_kernels.linear import RowParallelLinear
from npu_pipe_kernels.sharding import Sharding

__all__ = ["Squares", "is_cut", "squares_of", "what_is_whole"]


class Squares(NamedTuple):
    """Of the 2-norms of a rank's gradients, by the kind of their parameters."""

    whole: float
    cut: float


def squares_of(
    modules: Collection[nn.Module], *, without: Collection[int], digits: torch.dtype
) -> Squares:
    """without, digits: as for `gradients_of` and `square_norm`."""
    named = [(m, name, id(p)) for m in modules for name, p in m.named_parameters()]
    cut = {key for module, name, key in named if is_cut(module, name)}
    whole = {key for *_, key in named} - cut

    def square(others: set[int]) -> float:
        found = gradients_of(modules, without={*without, *others})
        return square_norm(found, digits=digits)

    return Squares(square(cut), square(whole))


def is_cut(module: nn.Module, name: str) -> bool:
    """Whether each rank has a part of this parameter, and not all of it."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    whole = isinstance(owner, RowParallelLinear) and last == "bias"
    return hasattr(owner, "cut") and not whole


def what_is_whole(modules: Collection[nn.Module], ranks: Ranks | None) -> int:
    """A number for the values of parameters that these ranks have alike; 0 for no ranks.

    Raises ConfigError where a layer is cut over other ranks than these, which a pipeline has been
    told of.
    """
    _require_ranks(modules, ranks)
    if ranks is None:
        return 0
    return digest_of(
        parameter
        for module in modules
        for name, parameter in module.named_parameters()
        if not is_cut(module, name)
    )


def _require_ranks(modules: Iterable[nn.Module], ranks: Ranks | None) -> None:
    for module in modules:
        for name, layer in module.named_modules():
            sharding = getattr(layer, "sharding", None)
            if not isinstance(sharding, Sharding):
                continue
            found = sharding.operators.ranks
            if found is not ranks and found.size > 1:
                raise ConfigError(
                    "a pipeline knows the ranks that share its layers: they fail together, and "
                    "have one norm",
                    f"{name or type(layer).__name__} is cut over {found.size} ranks, and the "
                    f"pipeline was given {'none' if ranks is None else 'others'}",
                    "make it with Pipeline(..., tensor_parallel=ranks)",
                )
