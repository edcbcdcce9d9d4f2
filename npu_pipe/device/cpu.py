"""Cpu: everything runs where it is called, with gloo between ranks."""

from __future__ import annotations

import resource
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from npu_pipe.device.device import Event, LaneOptions, MemoryUse, Stream

__all__ = ["Cpu"]


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


class Cpu:
    """See `Device`, which this is."""

    place = torch.device("cpu")
    backend = "gloo"
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

    def range(self, name: str) -> AbstractContextManager[object]:
        return torch.profiler.record_function(name)

    def mark(self, name: str) -> None:
        with self.range(name):
            pass

    def add_backend(
        self, group: dist.ProcessGroup, store: dist.Store, *, options: LaneOptions
    ) -> None:
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), options.timeout)
        group._register_backend(self.place, dist.ProcessGroup.BackendType.GLOO, gloo)

    def abort(self, group: dist.ProcessGroup) -> None:
        """Gloo's waits are woken in another way: see `npu_pipe.comm.groups`."""
