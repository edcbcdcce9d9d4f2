"""Receive buffers, used again and again.

A ring grows to the number of transfers in flight at once, which the program bounds (prefetch
plus what its schedule holds), not to the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_pipe.runtime.boundary import TensorMeta

__all__ = ["Ring"]


class Ring:
    """Sets of buffers for the tensors of one boundary, one way. `made` counts them."""

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self._metas = tuple(metas)
        self._free: list[list[Tensor]] = []
        self.made = 0

    def get(self) -> list[Tensor]:
        if self._free:
            return self._free.pop()
        self.made += 1
        return [torch.empty(meta.shape, dtype=meta.dtype) for meta in self._metas]

    def put(self, buffers: list[Tensor]) -> None:
        self._free.append(buffers)
