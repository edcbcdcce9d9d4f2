"""GlooLink: the transfers of one rank, on one gloo group a lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from npu_pipe.comm.control import Control
from npu_pipe.comm.failure import peer_failures
from npu_pipe.comm.groups import Groups
from npu_pipe.comm.receives import Receives
from npu_pipe.comm.ring import Ring, Rings
from npu_pipe.comm.unused import marked, unmarked
from npu_pipe.comm.ways import GRADIENTS, Ways, boundary_of
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.executor import Parcel
from npu_pipe.runtime.record import Recorder, now_us

__all__ = ["GlooLink"]


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

    copies = False
    tells_unused = True

    def copies_at_once(self, tensors: Sequence[Tensor]) -> bool:
        del tensors
        return False

    def __init__(self, groups: Groups, *, control: Control, poison: bool = False) -> None:
        """poison: fill free buffers with NaN."""
        self._poison = poison
        self._groups = groups
        self._control = control
        self._ways = Ways()
        self._recorder = Recorder()
        self._rings: Rings[Ring] = Rings()
        self._receives = Receives(self._ways, control)
        self._posted: dict[Action, _Posted] = {}
        self._taken: dict[Action, list[Tensor]] = {}
        self._sent: dict[Action, _Sent] = {}

    def recorder(self) -> Recorder:
        return Recorder()

    def start_window(
        self, schedule: Schedule, signatures: Sequence[str], recorder: Recorder
    ) -> None:
        self._ways.start_window(schedule, signatures)
        self._recorder = recorder
        self._rings.start_window()

    def post(self, receive: Action) -> None:
        for each in self._receives.ask(receive):
            self._post_now(each)

    def take(self, receive: Action) -> Parcel:
        since_us = now_us()
        for each in self._receives.require(receive):
            self._post_now(each)
        posted = self._posted.pop(receive)
        with peer_failures("{} was waiting for rank {}", receive, self._ways.way(receive).source):
            while posted.works:  # popped, so that no traceback keeps a connection open
                posted.works.pop(0).wait()
        there_us = now_us()
        self._recorder.add(receive, posted.since_us, there_us)
        self._recorder.wait(receive, since_us, there_us)
        self._taken[receive] = posted.buffers
        if receive.kind is Kind.RECV_B:
            return GRADIENTS, self._ways.needed(receive, unmarked(posted.buffers))
        return self._ways.unpack(receive, posted.buffers)

    def release(self, receive: Action) -> None:
        self._ring(receive).put(self._taken.pop(receive))

    def send(self, send: Action, parcel: Parcel) -> None:
        meta, tensors = parcel
        path, since_us = self._ways.way(send), now_us()
        if send.kind is Kind.SEND_F:
            form, is_new = self._ways.form_for(send, meta)
            if is_new:
                self._control.tell(path.target, form.to_json(), topic=boundary_of(send))
            if form.room:
                tensors = form.pack(meta, tensors, f"{send}")
        else:
            tensors = marked(tensors)
        tensors = [tensor.contiguous() for tensor in tensors]
        group = self._groups.lane(path.lane)
        with peer_failures("{} was going to rank {}", send, path.target):
            works = [group.send([tensor], path.target, 0) for tensor in tensors]
        self._sent[send] = _Sent(tensors, works, since_us)

    def ended(self, send: Action) -> None:
        sent = self._sent.pop(send)
        with peer_failures("{} was going to rank {}", send, self._ways.way(send).target):
            while sent.works:
                sent.works.pop(0).wait()
        self._recorder.add(send, sent.since_us, now_us())

    def finish(self) -> None:
        for send in list(self._sent):
            self.ended(send)
        self._control.finish()

    @property
    def buffers(self) -> int:
        return self._rings.made

    @property
    def in_use(self) -> int:
        return len(self._posted) + len(self._taken) + len(self._sent)

    def interrupt(self) -> None:
        """The team interrupts its groups itself."""

    def forget(self) -> None:
        """Drop all transfers under way: after an error."""
        self._ways.forget()
        self._posted.clear()
        self._taken.clear()
        self._sent.clear()
        self._receives.forget()

    def _post_now(self, receive: Action) -> None:
        path, buffers = self._ways.way(receive), self._ring(receive).get()
        group, since_us = self._groups.lane(path.lane), now_us()
        with peer_failures("{} was being posted for rank {}", receive, path.source):
            works = [group.recv([buffer], path.source, 0) for buffer in buffers]
        self._posted[receive] = _Posted(buffers, works, since_us)

    def _ring(self, receive: Action) -> Ring:
        form = self._ways.form(receive)
        assert form is not None
        wanted = form.tensors if receive.kind is Kind.RECV_F else form.gradients
        key = (receive.kind, receive.stage, wanted)
        return self._rings.get(key, lambda: Ring(wanted, poison=self._poison))
