"""Board: where a rank leaves word of what it does, for who asks after it is stuck or dead.

A few int64 cells and a line of text in shared memory. Writing is a store; nothing is sent. The
ranks of the same host map the same memory, which outlives a process that is killed.
"""

from __future__ import annotations

import enum
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from npu_pipe.ir.action import Kind
from npu_pipe.ir.mark import Mark, from_int

__all__ = ["Board", "Place", "State", "place_of"]

_CELLS = 8  # int64: the mark, calls, state, exchanges; the rest is free
_MARK, _CALLS, _STATE, _EXCHANGES = range(4)
_TEXT = slice(64, 128)
_SIZE = 128
_SHARED_MEMORY = Path("/dev/shm")

_ACTIONS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weights"}


class State(enum.IntEnum):
    OUTSIDE = 0  # in its user's code
    PREPARING = 1  # has begun a call, and not met the others
    MEETING = 2
    RUNNING = 3  # in a window: see the mark; without one, what is left to do together


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank is at. calls: how many it has begun, of which `call` is the last. exchanges: with
    the ranks that share its layers, how many it has begun and ended: odd while it waits in one."""

    mark: int
    calls: int
    state: int
    call: str
    exchanges: int = 0

    @property
    def action(self) -> Mark | None:
        return from_int(self.mark) if self.state == State.RUNNING and self.mark > 0 else None

    @property
    def waits(self) -> bool:
        """Whether it is another rank's turn."""
        if self.exchanges % 2:
            return True
        if self.state == State.RUNNING:
            return self.action is None or self.action.source is not None
        return self.state == State.MEETING

    def __str__(self) -> str:
        """As in: rank 2 was killed <where>."""
        return self._at + ", waiting for those that share its layers" * (self.exchanges % 2)

    @property
    def _at(self) -> str:
        if self.action is not None:
            kind, stage, microbatch = self.action.action
            at = f"{self.action.action} of {self.call}"
            what = f"(stage {stage}, {_ACTIONS[kind]} of microbatch {microbatch})"
            if self.action.source is None:
                return f"in {at} {what}"
            return f"before {at} {what}, waiting for rank {self.action.source}"
        if self.calls == 0:
            return "before its first call"
        return {
            State.OUTSIDE: f"after {self.call}",
            State.PREPARING: f"preparing {self.call}",
            State.MEETING: f"in {self.call}, meeting the other ranks",
            State.RUNNING: f"at the end of {self.call}",
        }[State(self.state)]


class Board:
    """This rank's. `cells[0]` is for the mark of what runs."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE)
        self.cells = _cells(self._memory)

    def share(self) -> Path:
        """Move into a new file, which others may map; it is the caller's to unlink."""
        folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        file, path = tempfile.mkstemp(prefix="npu_pipe_", dir=folder)
        try:
            os.truncate(file, _SIZE)
            self._move(mmap.mmap(file, _SIZE))
        finally:
            os.close(file)
        return Path(path)

    def withdraw(self) -> None:
        """Move out of the file."""
        self._move(mmap.mmap(-1, _SIZE))

    def begin(self, calls: int, call: str) -> None:
        """Note that a call has begun."""
        self._memory[_TEXT] = call.encode()[:64].ljust(64)
        self.cells[_CALLS] = calls
        self.cells[_MARK] = 0
        self.cells[_STATE] = State.PREPARING

    @contextmanager
    def during(self, state: State) -> Iterator[None]:
        before = self.cells[_STATE]
        self.cells[_STATE] = state
        try:
            yield
        finally:
            self.cells[_MARK] = 0
            self.cells[_STATE] = before

    def end(self) -> None:
        self.cells[_STATE] = State.OUTSIDE

    def exchange(self) -> None:
        """Note that an exchange with the ranks that share its layers has begun, or has ended."""
        self.cells[_EXCHANGES] += 1

    @property
    def place(self) -> Place:
        return place_of(self._memory)

    def _move(self, memory: mmap.mmap) -> None:
        memory[:] = self._memory[:]
        self._memory, self.cells = memory, _cells(memory)


def place_of(memory: mmap.mmap) -> Place:
    """What is written on a board."""
    mark, calls, state, exchanges = _cells(memory)[:4]
    text = memory[_TEXT].decode(errors="replace").strip()
    return Place(mark, calls, state, text, exchanges)


def _cells(memory: mmap.mmap) -> memoryview[int]:
    return memoryview(memory)[: 8 * _CELLS].cast("q")
