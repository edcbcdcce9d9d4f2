"""GlooLink: the transfers of one rank, on one gloo group a lane.

The form of what crosses a boundary is learnt from the first value: the sender tells it, the
receiver hears it before it posts its first receive there. Until then the receives of a
lane queue up in order. Forms are kept per signature (of what the model is called with, for one
microbatch), so that a shape seen before costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from npu_pipe.comm.control import Control
from npu_pipe.comm.failure import peer_failures
from npu_pipe.comm.groups import Groups
from npu_pipe.comm.ring import Ring
from npu_pipe.errors import DataError
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.program import Lane, route
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.boundary import Meta, TensorMeta
from npu_pipe.runtime.executor import Parcel
from npu_pipe.runtime.form import Form, form_from_json, form_of
from npu_pipe.runtime.record import Recorder, now_us

__all__ = ["GlooLink"]

_KNOWN = 64  # signatures whose forms are remembered: a batch may have a new shape every time
_RINGS = 32  # rings that are kept from one window to the next


_GRADIENTS = Meta("", ())  # both ends know the form of gradients from the activation


class _Path(NamedTuple):
    """Where a transfer goes, worked out once. form: what its form is known by."""

    source: int
    target: int
    lane: Lane
    form: tuple[int, int, int]


class _Posted(NamedTuple):
    buffers: list[Tensor]
    works: list[dist.Work]
    since_us: float


class _Sent(NamedTuple):
    tensors: list[Tensor]  # alive until sent
    works: list[dist.Work]
    since_us: float


class GlooLink:
    """See `npu_pipe.runtime.executor.Link`, which this is."""

    def __init__(self, schedule: Schedule, groups: Groups, *, control: Control) -> None:
        self._schedule = schedule
        self._groups = groups
        self._control = control
        self._recorder = Recorder()
        self._paths: dict[Action, _Path] = {}
        self._paths_of: dict[bool, dict[Action, _Path]] = {True: self._paths, False: {}}
        # By signature: the forms, by stage before the boundary, and the ranks that the activation
        # goes between; with replicas a boundary lies between several.
        self._known: dict[str, dict[tuple[int, int, int], Form]] = {}
        self._forms: Sequence[
            dict[tuple[int, int, int], Form]
        ] = ()  # of this window, by microbatch
        self._rings: dict[tuple[Kind, int, Sequence[TensorMeta]], Ring] = {}
        self._queues: dict[Lane, deque[Action]] = {lane: deque() for lane in Lane}
        self._posted: dict[Action, _Posted] = {}
        self._taken: dict[Action, list[Tensor]] = {}
        self._sent: dict[Action, _Sent] = {}

    def start_window(
        self, schedule: Schedule, signatures: Sequence[str], recorder: Recorder
    ) -> None:
        """Begin a window of this schedule; signatures: of each microbatch."""
        self._schedule = schedule
        self._paths = self._paths_of[schedule.training]
        self._recorder = recorder
        for signature in dict.fromkeys(signatures):
            self._known[signature] = self._known.pop(signature, {})  # now the latest
        while len(self._known) > max(_KNOWN, len(signatures)):
            del self._known[next(iter(self._known))]  # the same one at both ends
        self._forms = [self._known[signature] for signature in signatures]
        while len(self._rings) > 4 * schedule.stages + _RINGS:
            del self._rings[next(iter(self._rings))]

    def post(self, receive: Action) -> None:
        queue = self._queues[self._path(receive).lane]
        queue.append(receive)
        while queue and self._form(queue[0]) is not None:
            self._post_now(queue.popleft())

    def take(self, receive: Action) -> Parcel:
        since_us = now_us()
        queue = self._queues[self._path(receive).lane]
        while receive not in self._posted:
            if self._form(queue[0]) is None:
                self._hear(queue[0])
            self._post_now(queue.popleft())
        posted = self._posted.pop(receive)
        with peer_failures("{} was waiting for rank {}", receive, self._path(receive).source):
            while posted.works:  # popped, so that no traceback keeps a connection open
                posted.works.pop(0).wait()
        there_us = now_us()
        self._recorder.add(receive, posted.since_us, there_us)
        self._recorder.wait(receive, since_us, there_us)
        self._taken[receive] = posted.buffers
        if receive.kind is Kind.RECV_B:
            return _GRADIENTS, list(posted.buffers)
        form = self._form(receive)
        assert form is not None
        return form.unpack(posted.buffers)

    def release(self, receive: Action) -> None:
        self._ring(receive).put(self._taken.pop(receive))

    def send(self, send: Action, parcel: Parcel) -> None:
        meta, tensors = parcel
        if send.kind is Kind.SEND_F:
            tensors = self._announce(send, meta).pack(meta, tensors, f"{send}")
        tensors = [tensor.contiguous() for tensor in tensors]
        path, since_us = self._path(send), now_us()
        group = self._groups.lane(path.lane)
        with peer_failures("{} was going to rank {}", send, path.target):
            works = [group.send([tensor], path.target, 0) for tensor in tensors]
        self._sent[send] = _Sent(tensors, works, since_us)

    def ended(self, send: Action) -> None:
        sent = self._sent.pop(send)
        with peer_failures("{} was going to rank {}", send, self._path(send).target):
            while sent.works:
                sent.works.pop(0).wait()
        self._recorder.add(send, sent.since_us, now_us())

    def finish(self) -> None:
        for send in list(self._sent):
            self.ended(send)
        self._control.finish()

    def forget(self) -> None:
        """Drop all transfers under way: after an error."""
        self._posted.clear()
        self._taken.clear()
        self._sent.clear()
        for queue in self._queues.values():
            queue.clear()
        self._known.clear()  # some were told and never heard

    def _post_now(self, receive: Action) -> None:
        path, buffers = self._path(receive), self._ring(receive).get()
        group, since_us = self._groups.lane(path.lane), now_us()
        with peer_failures("{} was being posted for rank {}", receive, path.source):
            works = [group.recv([buffer], path.source, 0) for buffer in buffers]
        self._posted[receive] = _Posted(buffers, works, since_us)

    def _ring(self, receive: Action) -> Ring:
        form = self._form(receive)
        assert form is not None
        wanted = form.tensors if receive.kind is Kind.RECV_F else form.gradients
        key = (receive.kind, receive.stage, wanted)
        ring = self._rings.get(key)
        if ring is None:
            ring = self._rings[key] = Ring(wanted)
        return ring

    def _form(self, transfer: Action) -> Form | None:
        return self._forms[transfer.microbatch].get(self._path(transfer).form)

    def _hear(self, receive: Action) -> None:
        assert receive.kind is Kind.RECV_F, "a gradient's form is known from its activation"
        path = self._path(receive)
        form = form_from_json(self._control.hear(path.source, topic=_boundary(receive)))
        self._forms[receive.microbatch][path.form] = form

    def _announce(self, send: Action, meta: Meta) -> Form:
        known = self._form(send)
        if known is None:
            path = self._path(send)
            known = self._forms[send.microbatch][path.form] = form_of(meta)
            self._control.tell(path.target, known.to_json(), topic=_boundary(send))
        elif not known.fits(meta):
            raise DataError(
                "a stage returns one form for inputs of one form",
                f"stage {send.stage} returned {meta.leaves} for microbatch {send.microbatch}, "
                f"and {known.leaves} before",
                "return the same shapes each time, and what changes from one microbatch to the "
                "next in a tensor",
            )
        return known

    def _path(self, transfer: Action) -> _Path:
        path = self._paths.get(transfer)
        if path is None:
            source, target, lane = route(self._schedule, transfer)
            # A gradient has the form of the activation that went the other way.
            is_activation = transfer.kind in (Kind.SEND_F, Kind.RECV_F)
            pair = (source, target) if is_activation else (target, source)
            path = _Path(source, target, lane, (_boundary(transfer), *pair))
            self._paths[transfer] = path
        return path


def _boundary(transfer: Action) -> int:
    """The stage before the boundary that a transfer crosses."""
    down_model = transfer.kind in (Kind.SEND_F, Kind.RECV_B)
    return transfer.stage if down_model else transfer.stage - 1
