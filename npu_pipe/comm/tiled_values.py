"""Values on their way through a boundary in tiles of rows: one that arrives, one that leaves."""

# Values (..., width) are seen as matrices (rows, width); a part is some of the rows.

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from npu_pipe.comm.part import tile_ends
from npu_pipe.comm.team_link import TeamLink
from npu_pipe.comm.ways import GRADIENTS
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.mark import from_int, to_int
from npu_pipe.runtime.boundary import Meta, TensorMeta
from npu_pipe.runtime.form import Form

__all__ = ["Arriving", "Leaving"]


class Arriving:
    """A value whose parts are taken one after the other, and copied to where it will be whole.

    Made with its first part. buffer: where; None for a gradient that nobody needs, whose parts
    are empty. source: the rank that it comes from, for the board, whose first cell is `cells[0]`.
    """

    def __init__(
        self,
        link: TeamLink,
        parts: Sequence[Action],
        first: Sequence[Tensor],
        *,
        buffer: Tensor | None,
        source: int,
        cells: memoryview[int],
    ) -> None:
        self.buffer = buffer
        rows = 0 if buffer is None else _rows(buffer)
        self.ends = tile_ends(rows, len(parts))
        self._link = link
        self._parts = parts
        self._source = source
        self._cells = cells
        self._next = 0
        self._there = 0  # rows
        self._put(first)

    def wait(self, end: int) -> None:
        while self._there < end and self._next < len(self._parts):
            self._take()

    def finish(self) -> None:
        """All of it, empty parts too."""
        while self._next < len(self._parts):
            self._take()

    def _take(self) -> None:
        part = self._parts[self._next]
        running = self._cells[0]
        # Who is late is the rank that sends; this one waits, in the middle of an action.
        if running > 0:
            self._cells[0] = to_int(from_int(running).action, self._source)
        _, tensors = self._link.take(part)
        self._cells[0] = running
        self._put(tensors)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        start, self._there = self._there, self.ends[self._next]
        if self.buffer is not None and tensors:
            _matrix(self.buffer)[start : self._there].copy_(tensors[0])
        self._link.release(self._parts[self._next])
        self._next += 1


class Leaving:
    """A value whose parts are sent one after the other, once their rows have been made.

    agree: (memory, whether a gradient of it is wanted) -> the form to send it in.
    """

    def __init__(
        self,
        link: TeamLink,
        parts: Sequence[Action],
        *,
        agree: Callable[[Tensor, bool], Form],
    ) -> None:
        self._link = link
        self._parts = parts
        self._agree = agree
        self._next = 0
        self._ends: Sequence[int] = ()
        self._form: Form | None = None
        self._rows: Tensor | None = None

    @property
    def has_gone(self) -> bool:
        return self._next == len(self._parts)

    def begin(self, made: Tensor, *, needs_grad: bool) -> Sequence[int]:
        self._cut(self._agree(made, needs_grad), made)
        return self._ends

    def send(self, end: int) -> None:
        while self._next < len(self._parts) and self._ends[self._next] <= end:
            self._send()

    def send_all(self, form: Form, value: Tensor | None) -> None:
        """What has been made in one piece. value: None for a gradient that nobody wants."""
        if value is not None:
            self._cut(form, value.contiguous())
        while not self.has_gone:
            self._send()

    def _cut(self, form: Form, value: Tensor) -> None:
        self._form, self._rows = form, _matrix(value)
        self._ends = tile_ends(len(self._rows), len(self._parts))

    def _send(self) -> None:
        part, tensors, meta = self._parts[self._next], [], GRADIENTS
        if self._rows is not None and self._form is not None:
            start = self._ends[self._next - 1] if self._next else 0
            rows = self._rows[start : self._ends[self._next]]
            tensors = [rows]
            if part.kind is Kind.SEND_F:
                needs_grad = self._form.tensors[0].needs_grad
                leaf = TensorMeta(tuple(rows.shape), rows.dtype, needs_grad)
                meta = Meta(self._form.nesting, (leaf,))
        self._link.send(part, (meta, tensors))
        self._next += 1


def _rows(tensor: Tensor) -> int:
    return tensor.shape[:-1].numel()


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.view(_rows(tensor), tensor.shape[-1])
