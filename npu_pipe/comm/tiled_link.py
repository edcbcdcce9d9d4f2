"""TiledLink: a link on which the values of some boundaries travel in tiles of rows.

    sender     | F3: r0 | r1 | r2 |          open_send before F3, a part sent after each tile
    lane            `-p0-`-p1-`-p2           the parts of one transfer, next to each other
    receiver         take | F3': r0 | r1 | r2 |    take returns with p0; F3' waits for p1 and p2

Both ends cut alike, from the form of the whole, so it does not matter whether a stage works in
tiles: what one end makes in one piece goes in tiles at its end, and what the other wants in one
piece is waited for first. In a lane the parts take the place of the transfer, so the order is that
of the program. A part goes early only where its transfer is the next of its lane, and compute
that waits for one waits for what its sender is already making: no wait is new, each is only later
within its action, and a program that cannot hang untiled cannot hang tiled.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from npu_pipe.comm.part import Part
from npu_pipe.comm.port import Port
from npu_pipe.comm.ring import fill_with_nan
from npu_pipe.comm.team import Team
from npu_pipe.comm.team_link import TeamLink
from npu_pipe.comm.tiled_values import Arriving, Leaving
from npu_pipe.comm.ways import GRADIENTS, Ways, boundary_of
from npu_pipe.errors import DataError
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.boundary import Meta, TensorMeta, flatten_value
from npu_pipe.runtime.executor import Parcel
from npu_pipe.runtime.form import Form, form_from_json
from npu_pipe.runtime.record import Recorder

__all__ = ["Ports", "TiledLink"]

_WHOLES = 1 << 21  # topics of the forms of whole values, apart from those of other links
_SHAPES = 32  # of buffers that are kept from one window to the next, beside four a stage

_Memory: TypeAlias = tuple[torch.device, torch.Size, torch.dtype]


class Ports(NamedTuple):
    """Of one stage: the sides at which its product works in tiles."""

    before: Port | None
    after: Port | None


class TiledLink:
    """See `npu_pipe.runtime.executor.Link`, which this is, with `open_send` beside."""

    def __init__(
        self,
        inner: TeamLink,
        team: Team,
        *,
        tiles: Mapping[int, int],
        ports: Mapping[int, Ports],
        look: Callable[[], None],
        poison: bool = False,
    ) -> None:
        """inner: what the parts travel on. tiles: by the stage before a boundary, in how many its
        values go; alike on all ranks. ports: by this rank's stages. look: raises,
        before a window, where a stage cannot work in tiles any more. poison: fill free buffers
        with NaN."""
        self._inner = inner
        self._team = team
        self._tiles = {boundary: count for boundary, count in tiles.items() if count > 1}
        self._ports = dict(ports)
        self._look = look
        self._poison = poison
        self._ways = Ways()
        self._open: dict[Action, Leaving] = {}
        self._taken: dict[Action, Arriving] = {}
        self._free: defaultdict[_Memory, list[Tensor]] = defaultdict(list)
        self._made = 0
        for each in self._sides():
            each.close()

    @property
    def copies(self) -> bool:
        return self._inner.copies

    def copies_at_once(self, tensors: Sequence[Tensor]) -> bool:
        return self._inner.copies_at_once(tensors)

    def recorder(self) -> Recorder:
        return self._inner.recorder()

    def start_window(
        self, schedule: Schedule, signatures: Sequence[str], recorder: Recorder
    ) -> None:
        self._look()
        self._ways.start_window(schedule, signatures)
        self._inner.start_window(schedule, signatures, recorder)
        while len(self._free) > 4 * schedule.stages + _SHAPES:
            del self._free[next(iter(self._free))]

    def post(self, receive: Action) -> None:
        for part in self._parts(receive):
            self._inner.post(part)

    def take(self, receive: Action) -> Parcel:
        parts = self._parts(receive)
        if len(parts) == 1:
            return self._inner.take(receive)
        form = self._ways.form(receive) or self._hear(receive)
        is_gradient = receive.kind is Kind.RECV_B
        metas = form.gradients if is_gradient else form.tensors
        _, first = self._inner.take(parts[0])
        arriving = self._taken[receive] = Arriving(
            self._inner,
            parts,
            first,
            buffer=self._buffer(first[0].device, metas[0]) if metas else None,
            source=self._ways.way(receive).source,
            cells=self._team.board.cells,
        )
        tensors = [] if arriving.buffer is None else [arriving.buffer.data]
        found = self._ways.needed(receive, tensors) if is_gradient else tensors
        port = self._port(receive)
        if port is not None and found:
            port.arrive(arriving)
        else:
            arriving.finish()
        return (GRADIENTS, found) if is_gradient else form.unpack(found)

    def release(self, receive: Action) -> None:
        arriving = self._taken.pop(receive, None)
        if arriving is None:
            self._inner.release(receive)
            return
        arriving.finish()
        buffer = arriving.buffer
        if buffer is not None:
            if self._poison:
                fill_with_nan(buffer)
            self._free[buffer.device, buffer.shape, buffer.dtype].append(buffer)

    def open_send(self, send: Action) -> None:
        """See `npu_pipe.runtime.executor.Tiling`."""
        port = self._port(send)
        if port is not None:
            leaving = Leaving(self._inner, self._parts(send), agree=partial(self._agree, send))
            self._open[send] = leaving
            port.open(leaving)

    def send(self, send: Action, parcel: Parcel) -> None:
        parts = self._parts(send)
        if len(parts) == 1:
            self._inner.send(send, parcel)
            return
        meta, tensors = parcel
        port, leaving = self._port(send), self._open.pop(send, None)
        if port is not None:
            port.shut()
        form = self._form(send, meta)
        if leaving is None or not leaving.has_gone:
            whole = Leaving(self._inner, parts, agree=partial(self._agree, send))
            whole.send_all(form, tensors[0] if tensors else None)

    def ended(self, send: Action) -> None:
        for part in self._parts(send):
            self._inner.ended(part)

    def finish(self) -> None:
        self._inner.finish()
        self._team.control.finish()

    @property
    def buffers(self) -> int:
        return self._inner.buffers + self._made

    @property
    def in_use(self) -> int:
        return self._inner.in_use + len(self._taken)

    def interrupt(self) -> None:
        self._inner.interrupt()

    def forget(self) -> None:
        self._inner.forget()
        self._ways.forget()
        self._open.clear()
        self._taken.clear()
        self._free.clear()
        for each in self._sides():
            each.close()

    def _agree(self, send: Action, made: Tensor, needs_grad: bool) -> Form:
        """The form of what is going to be made there."""
        meta, _ = flatten_value(made, send.stage)
        (leaf,) = meta.tensors
        return self._form(send, meta._replace(leaves=(leaf._replace(needs_grad=needs_grad),)))

    def _form(self, send: Action, meta: Meta) -> Form:
        """Of the whole; the receiver is told a new one.

        Raises DataError for what cannot be cut into rows.
        """
        if send.kind is Kind.SEND_B:
            known = self._ways.form(send)
            assert known is not None, "a gradient's form is known from its activation"
            return known
        form, is_new = self._ways.form_for(send, meta, tells_need=False)
        if is_new:
            leaf = form.leaves[0] if len(form.leaves) == 1 else None
            if leaf is None or not leaf.shape:
                raise DataError(
                    "one tensor with rows crosses a boundary that is cut into tiles",
                    f"stage {send.stage} returned {', '.join(map(str, meta.leaves))[:300]}",
                    "return one tensor, or leave this boundary out of the tiles",
                )
            text = json.dumps([send.microbatch, form.to_json()])
            topic = _WHOLES + boundary_of(send)
            self._team.control.tell(self._ways.way(send).target, text, topic=topic)
        return form

    def _hear(self, receive: Action) -> Form:
        """The form of this value; those of other microbatches may come first."""
        source, topic = self._ways.way(receive).source, _WHOLES + boundary_of(receive)
        while (form := self._ways.form(receive)) is None:
            microbatch, text = json.loads(self._team.control.hear(source, topic=topic))
            self._ways.learn(receive._replace(microbatch=microbatch), form_from_json(text))
        return form

    def _parts(self, transfer: Action) -> Sequence[Action]:
        tiles = self._tiles.get(boundary_of(transfer), 1)
        return (transfer,) if tiles == 1 else [Part(transfer, number) for number in range(tiles)]

    def _port(self, transfer: Action) -> Port | None:
        """The side of this rank's stage that a transfer goes through, if it works in tiles."""
        if boundary_of(transfer) not in self._tiles:
            return None
        ports = self._ports[transfer.stage]
        is_before = transfer.kind in (Kind.RECV_F, Kind.SEND_B)
        return ports.before if is_before else ports.after

    def _buffer(self, device: torch.device, meta: TensorMeta) -> Tensor:
        free = self._free[device, torch.Size(meta.shape), meta.dtype]
        if free:
            return free.pop()
        self._made += 1
        with torch.inference_mode(False):  # an evaluation's buffers are used in training too
            return torch.empty(meta.shape, dtype=meta.dtype, device=device)

    def _sides(self) -> list[Port]:
        return [port for ports in self._ports.values() for port in ports if port is not None]
