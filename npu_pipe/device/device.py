"""Device: what the toolkit needs of the device that a rank computes on.

    device.py       this protocol
    npu.py          Ascend, with HCCL        \
    cuda.py         NVIDIA, with NCCL         | one file a kind; accelerator.py is what two share
    cpu.py          with gloo                /
    choose.py       which of them, and why; kinds.py: their names
    lanes.py        options of the transfers between them
    naming.py       actions by name in a profile; trace.py: profiles by torch itself

Nothing else in the package names a kind of device or imports what comes with one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from npu_pipe.device.lanes import LaneOptions
from npu_pipe.ir.action import Action

__all__ = ["Device", "Event", "MemoryUse", "Stream"]


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

    def synchronize(self) -> None:
        """Wait for all work given to it. Nothing interrupts that."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device: in tensors now, in tensors at most, and held by the allocator."""

    allocated: int
    highest: int
    reserved: int


class Device(Protocol):
    """One device, of whichever kind. `select` comes first."""

    @property
    def place(self) -> torch.device:
        """Where its tensors are."""
        ...

    @property
    def widest(self) -> torch.dtype:
        """The floating-point type of the most digits that all its operators take."""
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

    def is_profiled(self) -> bool:
        """Whether a profiler is on, so that it is worth while to name what runs."""
        ...

    def range(self, action: Action) -> AbstractContextManager[object]:
        """Name what the block runs in a profile: "action 2F0"."""
        ...

    def profile(self, folder: Path, *, name: str) -> AbstractContextManager[object]:
        """Take a profile of the block, and leave it in the folder under this name when it ends."""
        ...

    def add_backend(
        self, group: dist.ProcessGroup, store: dist.Store, *, name: str, options: LaneOptions
    ) -> None:
        """Have a group send and receive this device's tensors too, without waiting on the host.

        Two ranks are connected when they first use it, by the store. name: at most 32 characters.
        Options that the backend does not have are not looked at: see `in_vain`.
        """
        ...

    def abort(self, group: dist.ProcessGroup) -> None:
        """Break off what a group has under way on this device. It is of no use then."""
        ...
