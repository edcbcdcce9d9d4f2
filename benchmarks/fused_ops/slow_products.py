"""Products that take as long as they would on a device: they are computed, and then slept off.

    with SlowProducts(us_per_row=20) as slow: ...
    slow.spans                             (start, end) of each, on the clock of this host

A rank that sleeps leaves the cores to the others, as one does whose device computes. So a table
made on two cores says how much hides behind a product, and not how two ranks share a core.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu_pipe.runtime.record import now_us

__all__ = ["SlowProducts", "covered_us"]

_ATEN = torch.ops.aten
_LEFT = {  # where the left factor stands
    _ATEN.mm.default: 0,
    _ATEN.mm.out: 0,
    _ATEN.addmm.default: 1,
    _ATEN.addmm.out: 1,
}


class SlowProducts(TorchDispatchMode):
    """Inside it, a matrix product takes `us_per_row` for each row of its left factor whose width
    is `width`; others take what they take."""

    def __init__(self, *, us_per_row: float, width: int) -> None:
        super().__init__()
        self.spans: list[tuple[float, float]] = []
        self._us_per_row = us_per_row
        self._width = width

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        place = _LEFT.get(function)
        if place is None or args[place].shape[1] != self._width:
            return function(*args, **(kwargs or {}))
        start_us = now_us()
        result = function(*args, **(kwargs or {}))
        left_us = start_us + self._us_per_row * args[place].shape[0] - now_us()
        if left_us > 0:
            time.sleep(left_us / 1e6)
        self.spans.append((start_us, now_us()))
        return result


def covered_us(spans: list[tuple[float, float]], start_us: float, end_us: float) -> float:
    """For how much of the time from start to end at least one of the spans was running."""
    total, reached = 0.0, start_us
    for begin, end in sorted(spans):
        begin, end = max(begin, reached), min(end, end_us)
        if end > begin:
            total += end - begin
            reached = end
    return total
