"""Cpu: everything runs where it is called, with gloo between ranks."""

from __future__ import annotations

import resource
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from npu_pipe.device.device import Event, MemoryUse, Stream
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.device.trace import range_name, torch_profile
from npu_pipe.ir.action import Action

__all__ = ["Cpu"]

_NEVER = timedelta(days=365)  # who waits too long is for the watch to judge


class _Done:
    """An event of a device that is never behind."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event, /) -> float:
        del end
        return 0.0


class _Immediate:
    """The stream of such a device."""

    def record_event(self, event: Event | None = None, /) -> Event:
        return event if event is not None else _Done()

    def wait_event(self, event: Event, /) -> None:
        """It has been done."""

    def synchronize(self) -> None:
        """So has everything."""


class Cpu:
    """See `Device`, which this is."""

    place = torch.device("cpu")
    backend = "gloo"
    widest = torch.float64
    allocator_variable = None

    def select(self) -> None:
        """There is one."""

    def stream(self) -> Stream:
        return _Immediate()

    def current_stream(self) -> Stream:
        return _Immediate()

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        del stream
        return nullcontext()

    def event(self, *, timing: bool = False) -> Event:
        del timing
        return _Done()

    def synchronize(self) -> None:
        """It never is behind."""

    def memory(self) -> MemoryUse:
        """What the process has had at most, in all three places: nobody counts tensors."""
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryUse(highest, highest, highest)

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=dtype)

    def is_profiled(self) -> bool:
        return torch.autograd._profiler_enabled()

    def range(self, action: Action) -> AbstractContextManager[object]:
        return torch.profiler.record_function(range_name(action))

    def profile(self, folder: Path, *, name: str) -> AbstractContextManager[object]:
        return torch_profile((torch.profiler.ProfilerActivity.CPU,), folder / f"{name}.json")

    def add_backend(
        self, group: dist.ProcessGroup, store: dist.Store, *, name: str, options: LaneOptions
    ) -> None:
        del name, options
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), _NEVER)
        group._register_backend(self.place, dist.ProcessGroup.BackendType.GLOO, gloo)

    def abort(self, group: dist.ProcessGroup) -> None:
        """Gloo's waits are woken in another way: see `npu_pipe.comm.groups`."""
