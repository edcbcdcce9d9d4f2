"""Gradients of a batch that is given whole: the script's tensors get what their pieces got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Whole", "pass_gradients"]


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that wants a gradient, and the leaf that each microbatch was given of it."""

    tensor: Tensor
    pieces: Sequence[Tensor]

    def gradient(self) -> Tensor | None:
        """That of all pieces; None if no microbatch used its own."""
        found = [piece.grad for piece in self.pieces]
        if all(gradient is None for gradient in found):
            return None
        parts = [
            torch.zeros_like(piece) if gradient is None else gradient
            for piece, gradient in zip(self.pieces, found, strict=True)
        ]
        sizes = enumerate(zip(self.tensor.shape, self.pieces[0].shape, strict=True))
        cut = next((dim for dim, (whole, piece) in sizes if whole != piece), None)
        return torch.stack(parts).sum(0) if cut is None else torch.cat(parts, cut)


def pass_gradients(wholes: Sequence[Whole]) -> None:
    """Add them to `.grad`, or send them on into the graph that made the tensor. Once a step: a
    piece that were a view would fill a tensor of the whole batch in each microbatch's backward."""
    ready = [(each.tensor, each.gradient()) for each in wholes]
    tensors = [tensor for tensor, gradient in ready if gradient is not None]
    if tensors:
        torch.autograd.backward(tensors, [g for _, g in ready if g is not None])
