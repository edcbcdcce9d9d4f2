"""Accelerator: what devices with streams of their own share.

Torch gives each of them a module with the same names: torch.<kind>.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from npu_pipe.device.device import Event, MemoryUse, Stream
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.device.trace import range_name
from npu_pipe.ir.action import Action

__all__ = ["Accelerator", "time_out"]

_NEVER = timedelta(hours=24)  # who waits too long is for the watch to judge


class Accelerator:
    """The members of `Device` that are the same for all; `module` is torch.<kind>."""

    def __init__(self, place: torch.device, module: Any) -> None:
        self.place = place
        self._torch = module

    def select(self) -> None:
        self._torch.set_device(self.place)

    def stream(self) -> Stream:
        made: Stream = self._torch.Stream(self.place)
        return made

    def current_stream(self) -> Stream:
        current: Stream = self._torch.current_stream(self.place)
        return current

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        block: AbstractContextManager[object] = self._torch.stream(stream)
        return block

    def event(self, *, timing: bool = False) -> Event:
        made: Event = self._torch.Event(enable_timing=timing)
        return made

    def synchronize(self) -> None:
        self._torch.synchronize(self.place)

    def memory(self) -> MemoryUse:
        return MemoryUse(
            self._torch.memory_allocated(self.place),
            self._torch.max_memory_allocated(self.place),
            self._torch.memory_reserved(self.place),
        )

    def random_state(self) -> Tensor:
        state: Tensor = self._torch.get_rng_state(self.place)
        return state

    def set_random_state(self, state: Tensor) -> None:
        self._torch.set_rng_state(state, self.place)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        return torch.autocast(self.place.type, dtype=dtype)

    def is_profiled(self) -> bool:
        return torch.autograd._profiler_enabled()

    def range(self, action: Action) -> AbstractContextManager[object]:
        return torch.profiler.record_function(range_name(action))


def time_out(options: LaneOptions) -> timedelta:
    """After which a backend itself gives a transfer up."""
    return _NEVER if options.transfer_s is None else timedelta(seconds=options.transfer_s)
