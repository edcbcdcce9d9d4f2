"""Slots: memory that two ranks of one host share, a slot for each message under way.

    sender     Slots.get -> a free slot, filled      told by number, beside
    receiver   Mapped[number] -> the same memory     used as it is, then freed: one byte is cleared

The pool grows to the number of messages that are under way or in use at once, which the program
bounds. Memory is made in slabs that double, so that it takes few file descriptors; a page that was
never written takes no memory, and all of it is gone with the processes, however they end.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from npu_pipe.errors import RunError
from npu_pipe.runtime.boundary import TensorMeta

__all__ = ["Layout", "Mapped", "Slab", "Slot", "Slots", "layout_of"]

_SLOTS = 1 << 20  # of one sender: as many bytes of flags, of which few are ever touched
_LEAST_BYTES = 4096
_ALIGNMENT = 64
_VIEWS = 16  # layouts whose tensors a slot keeps


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the tensors of a message lie in its slot. Compared by identity."""

    metas: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    nbytes: int


def layout_of(metas: Sequence[TensorMeta]) -> Layout:
    offsets, end = [], 0
    for meta in metas:
        offsets.append(end)
        count = 1
        for size in meta.shape:
            count *= size
        nbytes = count * meta.dtype.itemsize
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return Layout(tuple(metas), tuple(offsets), end)


@dataclass(slots=True, eq=False)
class Slot:
    """One piece of a slab. memory: its bytes."""

    number: int
    memory: Tensor
    _views: dict[Layout, list[Tensor]] = field(default_factory=dict)

    def tensors(self, layout: Layout) -> list[Tensor]:
        """The tensors of a message, in this memory."""
        views = self._views.get(layout)
        if views is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            views = self._views[layout] = [
                self._tensor(meta, offset)
                for meta, offset in zip(layout.metas, layout.offsets, strict=True)
            ]
        return views

    def _tensor(self, meta: TensorMeta, offset: int) -> Tensor:
        nbytes = meta.dtype.itemsize * torch.Size(meta.shape).numel()
        return self.memory[offset : offset + nbytes].view(meta.dtype).view(meta.shape)


@dataclass(frozen=True, slots=True)
class Slab:
    """`count` slots of `capacity` bytes, numbered from `first`. file: to be sent, then closed."""

    first: int
    count: int
    capacity: int
    file: int

    def slots(self) -> list[Slot]:
        with torch.inference_mode(False):  # an evaluation's slots are used in training too
            # mmap would keep a file descriptor as long as the memory.
            path, size = f"/proc/self/fd/{self.file}", self.count * self.capacity
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            pieces = torch.split(memory, self.capacity)
        return [Slot(self.first + index, piece) for index, piece in enumerate(pieces)]


class Slots:
    """The sender's pool. flags: a byte a slot, 1 while the message is under way or in use.
    made: how many slots there are."""

    def __init__(self) -> None:
        self.flags_file = os.memfd_create("npu_pipe flags")
        os.ftruncate(self.flags_file, _SLOTS)
        self._flags = mmap.mmap(self.flags_file, _SLOTS)
        self._free: dict[int, list[Slot]] = {}  # by capacity; the last one freed is warm
        self._busy: dict[int, list[Slot]] = {}
        self.made = 0

    def get(self, nbytes: int) -> tuple[Slot, Slab | None]:
        """A slot, now busy, and the slab that was made for it, of which to tell the receiver."""
        capacity = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else _LEAST_BYTES
        slab = None
        free = self._free.setdefault(capacity, [])
        busy = self._busy.setdefault(capacity, [])
        if not free:
            flags = self._flags
            free += [slot for slot in reversed(busy) if not flags[slot.number]]
            if free:
                busy[:] = [slot for slot in busy if flags[slot.number]]
            else:
                slab = self._grow(capacity, max(1, len(busy)))
                free += reversed(slab.slots())
        slot = free.pop()
        busy.append(slot)
        self._flags[slot.number] = 1
        return slot, slab

    def _grow(self, capacity: int, count: int) -> Slab:
        if self.made + count > _SLOTS:
            raise RunError(
                f"at most {_SLOTS} messages of one rank to another are under way at once",
                f"{self.made} are",
                "use fewer microbatches",
            )
        file = os.memfd_create("npu_pipe slots")
        os.ftruncate(file, count * capacity)
        slab = Slab(self.made, count, capacity, file)
        self.made += count
        return slab


class Mapped:
    """The receiver's view of a sender's slots."""

    def __init__(self, flags_file: int) -> None:
        self._flags = mmap.mmap(flags_file, _SLOTS)
        self._slots: list[Slot] = []

    def add(self, slab: Slab) -> None:
        assert slab.first == len(self._slots)
        self._slots += slab.slots()

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def free(self, slot: Slot) -> None:
        self._flags[slot.number] = 0
