"""Cutting a batch into microbatches along the first dimension, and joining their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from npu_pipe.errors import DataError

__all__ = ["join_outputs", "rows_of", "split_batch"]


def rows_of(value: Any, what: str) -> int | None:
    """The first dimension that all its tensors share; None if it holds no tensor.

    A tensor without dimensions has no rows: it goes into each microbatch, as what is no tensor.
    Raises DataError when a tensor is not dense or the tensors have no common first dimension.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise DataError(
                "the tensors of a batch are dense",
                f"the {what} hold a {'nested' if tensor.is_nested else tensor.layout} tensor",
                "make it dense, and let the first stage convert it",
            )
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) > 1 or 0 in sizes:
        raise DataError(
            f"the tensors of the {what} share a first dimension, the batch, of at least 1",
            f"theirs are: {', '.join(map(str, sorted(sizes)))}",
            "give tensors of (batch, ...), or Microbatches that are cut already",
        )
    return next(iter(sizes), None)


def split_batch(value: Any, microbatches: int, what: str) -> list[Any]:
    """m values of the same nesting, each tensor of (batch, ...) cut along its first dimension.

    The first batch % m pieces have one row more than the others. What is not a tensor goes into
    each. The pieces are views without gradient: a batch is data.
    Raises DataError as `rows_of` does, and when there are fewer rows than microbatches.
    """
    rows = rows_of(value, what)
    if rows is not None and rows < microbatches:
        raise DataError(
            "each microbatch has at least one row",
            f"the {what} have {rows} rows for {microbatches} microbatches",
            f"give at least {microbatches} rows, or cut them into fewer microbatches",
        )
    if isinstance(value, Tensor) and value.dim():
        return _pieces(value, microbatches)
    leaves, spec = pytree.tree_flatten(value)
    cut = [
        _pieces(leaf, microbatches)
        if isinstance(leaf, Tensor) and leaf.dim()
        else [leaf] * microbatches
        for leaf in leaves
    ]
    if not cut:
        return [value] * microbatches
    return [pytree.tree_unflatten(list(piece), spec) for piece in zip(*cut, strict=True)]


def join_outputs(outputs: Sequence[Any]) -> Any:
    """The inverse for what the last stage returned per microbatch."""
    flat, specs = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    return pytree.tree_unflatten([_join(leaves) for leaves in zip(*flat, strict=True)], specs[0])


def _join(leaves: Sequence[Any]) -> Any:
    """Rows one after the other; scalars become a vector, one a microbatch."""
    if not isinstance(leaves[0], Tensor):
        return leaves[0]
    return torch.cat(list(leaves)) if leaves[0].dim() else torch.stack(list(leaves))


def _pieces(tensor: Tensor, microbatches: int) -> list[Tensor]:
    # `data`, not `detach`: a first stage that works on its input in place must not make
    # autograd believe that it has changed the other microbatches.
    return [piece.data for piece in torch.tensor_split(tensor.detach(), microbatches)]
