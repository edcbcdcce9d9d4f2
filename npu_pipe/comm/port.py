"""Port: what goes through one side of a stage, while its product there works on it in tiles.

The link puts in what comes and what is to go; the product takes the one and fills the other, tile
by tile, in the same action. Between two actions it holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["Incoming", "Outgoing", "Port"]


class Incoming(Protocol):
    """A value of which the first tile is there."""

    @property
    def ends(self) -> Sequence[int]:
        """Where its tiles end, in rows."""
        ...

    def wait(self, end: int) -> None:
        """Until all rows before `end` are there."""
        ...


class Outgoing(Protocol):
    """A value that may leave in tiles, before all of it has been made."""

    def begin(self, made: Tensor, *, needs_grad: bool) -> Sequence[int]:
        """Where the tiles end of what will be written to `made`."""
        ...

    def send(self, end: int) -> None:
        """All rows before `end` have been made: what has not gone of them goes."""
        ...


class Port:
    """See `npu_pipe_kernels.boundary.Side`, which this is."""

    def __init__(self) -> None:
        self._incoming: Incoming | None = None
        self._outgoing: Outgoing | None = None

    def arrive(self, incoming: Incoming) -> None:
        """For the link: the next product takes this, whose later tiles it waits for itself."""
        self._incoming = incoming

    def open(self, outgoing: Outgoing) -> None:
        """For the link: what the next product makes may leave by this."""
        self._outgoing = outgoing

    def shut(self) -> None:
        """For the link: that has been made."""
        self._outgoing = None

    def close(self) -> None:
        """For the link: nothing goes through any more."""
        self._incoming = self._outgoing = None

    def arriving(self) -> Sequence[int]:
        return () if self._incoming is None else self._incoming.ends

    def wait(self, end: int) -> None:
        if self._incoming is not None:
            self._incoming.wait(end)

    def leaving(self, made: Tensor, *, needs_grad: bool) -> Sequence[int]:
        if self._outgoing is None:
            return ()
        return self._outgoing.begin(made, needs_grad=needs_grad)

    def send(self, end: int) -> None:
        if self._outgoing is not None:
            self._outgoing.send(end)
