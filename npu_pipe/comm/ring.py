"""Receive buffers, used again and again.

A ring grows to the number of transfers in flight at once, which the program bounds (prefetch
plus what its schedule holds), not to the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from npu_pipe.runtime.boundary import TensorMeta

__all__ = ["Ring", "Rings", "fill_with_nan"]

_KEPT_BYTES = 1 << 26


class Ring:
    """Sets of buffers for the tensors of one boundary, one way. `made` counts them, and `nbytes`
    what they take.

    poison: fill what is free with NaN, so that who still reads it is found out.
    """

    def __init__(self, metas: Sequence[TensorMeta], *, poison: bool) -> None:
        self.nbytes = 0
        self._metas = tuple(metas)
        self._poison = poison
        self._free: list[list[Tensor]] = []
        self.made = 0

    def get(self) -> list[Tensor]:
        if self._free:
            return self._free.pop()
        self.made += 1
        with torch.inference_mode(False):  # an evaluation's buffers are used in training too
            buffers = [
                torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in self._metas
            ]
        self.nbytes += sum(buffer.nbytes for buffer in buffers)
        return buffers

    def put(self, buffers: list[Tensor]) -> None:
        if self._poison:
            for buffer in buffers:
                fill_with_nan(buffer)
        self._free.append(buffers)


class _Sized(Protocol):
    made: int
    nbytes: int


_R = TypeVar("_R", bound=_Sized)


class Rings(Generic[_R]):
    """Rings by what they hold. The latest window's are kept for the next, and of the others as
    many as take no more memory than those do: shapes that come back find theirs."""

    def __init__(self) -> None:
        self._rings: dict[Hashable, _R] = {}  # the latest used last
        self._used: dict[Hashable, _R] = {}  # since the window began

    def get(self, key: Hashable, make: Callable[[], _R]) -> _R:
        ring = self._used.get(key)
        if ring is None:
            ring = self._used[key] = self._rings.pop(key, None) or make()
        return ring

    def start_window(self) -> None:
        room = max(_KEPT_BYTES, sum(ring.nbytes for ring in self._used.values()))
        for key, ring in reversed(list(self._rings.items())):
            room -= ring.nbytes
            if room < 0:
                del self._rings[key]
        self._rings |= self._used
        self._used = {}

    def clear(self) -> None:
        self._rings.clear()
        self._used.clear()

    @property
    def made(self) -> int:
        return sum(ring.made for ring in (*self._rings.values(), *self._used.values()))


def fill_with_nan(buffer: Tensor) -> None:
    """Every bit set: NaN as any floating number, -1 as an integer."""
    buffer.view(-1).view(torch.uint8).fill_(255)
