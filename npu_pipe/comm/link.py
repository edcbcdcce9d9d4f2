"""GlooLink: the transfers of one rank, on one gloo group a lane.

The form of what crosses a boundary is learnt from the first value: the sender tells it, the
receiver hears it before it posts its first receive there. Until then the receives of a
lane queue up in order. Forms are kept per `signature` (of the model's input), so that a shape
seen before costs nothing.
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
from npu_pipe.runtime.boundary import Meta, TensorMeta, meta_from_json
from npu_pipe.runtime.executor import Parcel
from npu_pipe.runtime.record import Recorder, now_us

__all__ = ["GlooLink"]

_KNOWN = 64  # signatures whose forms are remembered: a batch may have a new shape every time


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
        # Of this window: by stage before the boundary, and the ranks that the activation goes
        # between; with replicas a boundary lies between several.
        self._metas: dict[tuple[int, int, int], Meta] = {}
        self._known: dict[str, dict[tuple[int, int, int], Meta]] = {}  # by signature
        self._rings: dict[tuple[Kind, int], tuple[Sequence[TensorMeta], Ring]] = {}
        self._queues: dict[Lane, deque[Action]] = {lane: deque() for lane in Lane}
        self._posted: dict[Action, _Posted] = {}
        self._taken: dict[Action, list[Tensor]] = {}
        self._sent: dict[Action, _Sent] = {}

    def start_window(self, schedule: Schedule, signature: str, recorder: Recorder) -> None:
        """Begin a window of this schedule, whose model input has this signature."""
        self._schedule = schedule
        self._recorder = recorder
        self._metas = self._known.pop(signature, {})
        self._known[signature] = self._metas  # now the latest
        if len(self._known) > _KNOWN:  # the same one is forgotten at both ends
            del self._known[next(iter(self._known))]

    def post(self, receive: Action) -> None:
        queue = self._queues[route(self._schedule, receive).lane]
        queue.append(receive)
        while queue and self._meta(queue[0]) is not None:
            self._post_now(queue.popleft())

    def take(self, receive: Action) -> Parcel:
        queue = self._queues[route(self._schedule, receive).lane]
        while receive not in self._posted:
            if self._meta(queue[0]) is None:
                self._hear(queue[0])
            self._post_now(queue.popleft())
        posted = self._posted.pop(receive)
        source = route(self._schedule, receive).source
        with peer_failures(f"{receive} was waiting for rank {source}"):
            while posted.works:  # popped, so that no traceback keeps a connection open
                posted.works.pop(0).wait()
        self._recorder.add(receive, posted.since_us, now_us())
        self._taken[receive] = posted.buffers
        meta = self._meta(receive)
        assert meta is not None
        return meta, list(posted.buffers)

    def release(self, receive: Action) -> None:
        self._ring(receive).put(self._taken.pop(receive))

    def send(self, send: Action, parcel: Parcel) -> None:
        meta, tensors = parcel
        if send.kind is Kind.SEND_F:
            self._announce(send, meta)
        tensors = [tensor.contiguous() for tensor in tensors]
        _, target, lane = route(self._schedule, send)
        since_us = now_us()
        with peer_failures(f"{send} was going to rank {target}"):
            works = [self._groups.lane(lane).send([tensor], target, 0) for tensor in tensors]
        self._sent[send] = _Sent(tensors, works, since_us)

    def ended(self, send: Action) -> None:
        sent = self._sent.pop(send)
        target = route(self._schedule, send).target
        with peer_failures(f"{send} was going to rank {target}"):
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

    def _post_now(self, receive: Action) -> None:
        source, _, lane = route(self._schedule, receive)
        buffers = self._ring(receive).get()
        since_us = now_us()
        with peer_failures(f"{receive} was being posted for rank {source}"):
            works = [self._groups.lane(lane).recv([buffer], source, 0) for buffer in buffers]
        self._posted[receive] = _Posted(buffers, works, since_us)

    def _ring(self, receive: Action) -> Ring:
        meta = self._meta(receive)
        assert meta is not None
        wanted = meta.tensors if receive.kind is Kind.RECV_F else meta.gradients
        key = (receive.kind, receive.stage)
        if key not in self._rings or self._rings[key][0] != wanted:
            self._rings[key] = (wanted, Ring(wanted))
        return self._rings[key][1]

    def _meta(self, transfer: Action) -> Meta | None:
        return self._metas.get(self._key(transfer))

    def _hear(self, receive: Action) -> None:
        assert receive.kind is Kind.RECV_F, "a gradient's form is known from its activation"
        source = route(self._schedule, receive).source
        meta = meta_from_json(self._control.hear(source, topic=_boundary(receive)))
        self._metas[self._key(receive)] = meta

    def _announce(self, send: Action, meta: Meta) -> None:
        known = self._meta(send)
        if known is None:
            self._metas[self._key(send)] = meta
            target = route(self._schedule, send).target
            self._control.tell(target, meta.to_json(), topic=_boundary(send))
        elif known != meta:
            raise DataError(
                "a stage returns one form for inputs of one form",
                f"stage {send.stage} returned {meta.leaves} for microbatch {send.microbatch}, "
                f"and {known.leaves} before",
                "return the same shapes each time, and what changes from one microbatch to the "
                "next in a tensor",
            )

    def _key(self, transfer: Action) -> tuple[int, int, int]:
        # A gradient has the form of the activation that went the other way.
        source, target, _ = route(self._schedule, transfer)
        is_activation = transfer.kind in (Kind.SEND_F, Kind.RECV_F)
        pair = (source, target) if is_activation else (target, source)
        return _boundary(transfer), *pair


def _boundary(transfer: Action) -> int:
    """The stage before the boundary that a transfer crosses."""
    down_model = transfer.kind in (Kind.SEND_F, Kind.RECV_B)
    return transfer.stage if down_model else transfer.stage - 1
