"""Device: what the toolkit needs of the device that a rank computes on.

    device.py       this protocol
    npu.py          Ascend, with HCCL        \
    cuda.py         NVIDIA, with NCCL         | one file a kind; accelerator.py is what two share
    cpu.py          with gloo                /
    choose.py       which of them, and why

Nothing else in the package names a kind of device or imports what comes with one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Device", "Event", "LaneOptions", "MemoryUse", "Stream"]


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether all work before it has been done."""
        ...

    def elapsed_time(self, end: Event, /) -> float:
        """Milliseconds from this event to a later one; both made with `timing`, and done."""
        ...


class Stream(Protocol):
    """Work that the device does in order, beside that of other streams."""

    def record_event(self, event: Event | None = None, /) -> Event:
        """An event after all work given to the stream up to now."""
        ...

    def wait_event(self, event: Event, /) -> None:
        """Have what is given to this stream from now on wait for an event."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device: in tensors now, in tensors at most, and held by the allocator."""

    allocated: int
    highest: int
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """How the communicators of a lane are made; None leaves a value to the backend.

    timeout: after which the backend itself gives a transfer up; who waits too long is for the
        watch to judge, and much sooner.
    name: at most 32 characters. buffer_mb: of a communicator of all ranks; those of two ranks,
        which transfers use, take P2P_HCCL_BUFFSIZE instead.
    traffic_class, service_level: quality of service on the network.
    expansion_mode: where the backend runs its own steps: 0 its default, 1 host, 2 device, 3 vector
        cores.
    """

    name: str = "npu_pipe"
    timeout: timedelta = timedelta(hours=24)
    buffer_mb: int | None = None
    traffic_class: int | None = None
    service_level: int | None = None
    expansion_mode: int | None = None


class Device(Protocol):
    """One device, of whichever kind. `select` comes first."""

    @property
    def place(self) -> torch.device:
        """Where its tensors are."""
        ...

    @property
    def backend(self) -> str:
        """The backend of its process groups, by the name that torch.distributed has for it."""
        ...

    @property
    def allocator_variable(self) -> str | None:
        """The environment variable that its memory allocator reads its settings from."""
        ...

    def select(self) -> None:
        """Make it the current one of this thread."""
        ...

    def stream(self) -> Stream:
        """A new stream beside the one that computes."""
        ...

    def current_stream(self) -> Stream:
        """The stream that this thread gives work to."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Give the work of the block to another stream."""
        ...

    def event(self, *, timing: bool = False) -> Event:
        """An event that a stream can record, again and again."""
        ...

    def synchronize(self) -> None:
        """Wait for all streams. Nothing interrupts it."""
        ...

    def memory(self) -> MemoryUse: ...

    def random_state(self) -> Tensor:
        """Of its generator, as bytes on the CPU."""
        ...

    def set_random_state(self, state: Tensor) -> None: ...

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Run the operators of the block in this dtype where that is safe."""
        ...

    def range(self, name: str) -> AbstractContextManager[object]:
        """Name what the block runs in a profile."""
        ...

    def mark(self, name: str) -> None:
        """Name a moment in a profile."""
        ...

    def add_backend(
        self, group: dist.ProcessGroup, store: dist.Store, *, options: LaneOptions
    ) -> None:
        """Have a group send and receive this device's tensors too, without waiting on the host.

        Two ranks are connected when they first use it, by the store.
        """
        ...

    def abort(self, group: dist.ProcessGroup) -> None:
        """Break off what a group has under way on this device. It is of no use then."""
        ...
