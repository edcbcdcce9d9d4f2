"""Receive buffers, used again and again.

A ring grows to the number of transfers in flight at once, which the program bounds (prefetch
plus what its schedule holds), not to the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_pipe.runtime.boundary import TensorMeta

__all__ = ["Ring", "fill_with_nan"]


class Ring:
    """Sets of buffers for the tensors of one boundary, one way. `made` counts them.

    poison: fill what is free with NaN, so that who still reads it is found out.
    """

    def __init__(self, metas: Sequence[TensorMeta], *, poison: bool) -> None:
        self._metas = tuple(metas)
        self._poison = poison
        self._free: list[list[Tensor]] = []
        self.made = 0

    def get(self) -> list[Tensor]:
        if self._free:
            return self._free.pop()
        self.made += 1
        with torch.inference_mode(False):  # an evaluation's buffers are used in training too
            return [torch.empty(meta.shape, dtype=meta.dtype) for meta in self._metas]

    def put(self, buffers: list[Tensor]) -> None:
        if self._poison:
            for buffer in buffers:
                fill_with_nan(buffer)
        self._free.append(buffers)


def fill_with_nan(buffer: Tensor) -> None:
    """Every bit set: NaN as any floating number, -1 as an integer."""
    buffer.view(-1).view(torch.uint8).fill_(255)
