"""Cutting a batch into microbatches along the first dimension, and joining their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from npu_pipe.errors import DataError

__all__ = ["join_outputs", "split_batch"]


def split_batch(value: Any, microbatches: int, what: str) -> list[Any]:
    """m values of the same nesting, each tensor of (batch, ...) cut into (batch / m, ...).

    What is not a tensor goes into each. The pieces are views without gradient: a batch is data.
    Raises DataError when a tensor is not dense, the tensors have no common first dimension, or m
    does not divide it.
    """
    leaves, spec = pytree.tree_flatten(value)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            raise DataError(
                "the tensors of a batch are dense",
                f"the {what} hold a {'nested' if leaf.is_nested else leaf.layout} tensor",
                "make it dense, and let the first stage convert it",
            )
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves if isinstance(leaf, Tensor)}
    if len(sizes) != 1 or 0 in sizes:
        found = ", ".join(map(str, sorted(sizes))) or "no tensor"
        raise DataError(
            f"the tensors of the {what} share a first dimension, the batch, of at least 1",
            f"theirs are: {found}",
            "give tensors of (batch, ...)",
        )
    (size,) = sizes
    if size % microbatches:
        below = size // microbatches * microbatches
        near = [n for n in (below, below + microbatches) if n]
        raise DataError(
            "the batch divides into microbatches of one size",
            f"the {what} have {size} rows for {microbatches} microbatches",
            f"give {' or '.join(map(str, near))} rows, or another number of microbatches",
        )
    cut = [
        # `data`, not `detach`: a first stage that works on its input in place must not make
        # autograd believe that it has changed the other microbatches.
        [piece.data for piece in torch.split(leaf.detach(), size // microbatches)]
        if isinstance(leaf, Tensor)
        else (leaf,) * microbatches
        for leaf in leaves
    ]
    return [pytree.tree_unflatten(list(piece), spec) for piece in zip(*cut, strict=True)]


def join_outputs(outputs: Sequence[Any]) -> Any:
    """The inverse for what the last stage returned per microbatch."""
    flat, specs = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    joined = [
        torch.cat(leaves) if isinstance(leaves[0], Tensor) and leaves[0].dim() else leaves[0]
        for leaves in zip(*flat, strict=True)
    ]
    return pytree.tree_unflatten(joined, specs[0])
