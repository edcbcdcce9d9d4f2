"""DeviceLink: the transfers of one rank whose stages are on a device with streams of its own.

    compute   ... F2 | F3 |  wait(a3)  B0 ...        a stream for what computes
    sends        `-> SEND_F2                         one a lane: after the event of what is sent
    receives   RECV_B0 (a3) RECV_B1 ...              one a lane: after the event that frees a buffer

The host gives work to the streams and does not wait; a transfer starts when its own input is
there, and compute waits for what it is about to read, nothing else. A transfer that was issued
under the stream that computes would wait for all that was given to it before.

The forms of what crosses, and the numbers and texts in it, go over the control channel.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from npu_pipe.comm.device_lanes import Connection, Streams, abort_soon, require_unbroken
from npu_pipe.comm.device_record import DeviceRecorder
from npu_pipe.comm.device_ring import DeviceRing
from npu_pipe.comm.device_wait import DeviceWait
from npu_pipe.comm.failure import peer_failures
from npu_pipe.comm.receives import Receives
from npu_pipe.comm.ring import Rings
from npu_pipe.comm.team import Team
from npu_pipe.comm.ways import GRADIENTS, Ways, boundary_of
from npu_pipe.device.device import Device, Event, Stream
from npu_pipe.errors import DataError
from npu_pipe.ir.action import Action, Kind, flatten
from npu_pipe.ir.mark import to_int
from npu_pipe.ir.program import Lane
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.executor import Parcel
from npu_pipe.runtime.form import Form
from npu_pipe.runtime.record import Recorder

__all__ = ["DeviceLink"]

_NOTES = 1 << 20  # topics of the constants, apart from those of the forms


class _Transfer(NamedTuple):
    tensors: list[Tensor]  # alive until it has ended
    works: list[dist.Work]


class DeviceLink:
    """See `npu_pipe.runtime.executor.Link`, which this is."""

    copies = False

    def copies_at_once(self, tensors: Sequence[Tensor]) -> bool:
        del tensors
        return False

    def __init__(
        self,
        team: Team,
        device: Device,
        *,
        connections: tuple[Connection, ...],
        streams: Streams,
        wait: DeviceWait,
        poison: bool = False,
    ) -> None:
        """connections: of the team's lanes on the device, as `open_lanes` gives them.
        poison: fill free buffers with NaN."""
        self._groups = team.groups
        self._control = team.control
        self._device = device
        self._connections = connections
        self._streams = streams
        self._wait = wait
        self._poison = poison
        self._ways = Ways()
        self._recorder: DeviceRecorder | None = None
        self._rings: Rings[DeviceRing] = Rings()
        self._receives = Receives(self._ways, team.control)
        self._posted: dict[Action, _Transfer] = {}
        self._taken: dict[Action, list[Tensor]] = {}
        self._sent: dict[Action, _Transfer] = {}
        self._notes: dict[tuple[int, int, int], str] = {}
        self._schedule: Schedule | None = None
        self._split: frozenset[tuple[int, int]] = frozenset()  # stages and microbatches with an I

    def recorder(self) -> Recorder:
        return DeviceRecorder(self._device, self._wait)

    def start_window(
        self, schedule: Schedule, signatures: Sequence[str], recorder: Recorder
    ) -> None:
        self._ways.start_window(schedule, signatures)
        self._recorder = recorder if isinstance(recorder, DeviceRecorder) else None
        if schedule is not self._schedule:
            self._schedule = schedule
            self._split = frozenset(
                (action.stage, action.microbatch)
                for order in schedule.orders
                for step in order
                for action in flatten(step)
                if action.kind is Kind.I
            )
        self._rings.start_window()

    def post(self, receive: Action) -> None:
        for each in self._receives.ask(receive):
            self._post_now(each)

    def take(self, receive: Action) -> Parcel:
        path = self._ways.way(receive)
        self._wait.for_room()
        for each in self._receives.require(receive):
            self._post_now(each)
        posted = self._posted.pop(receive)
        user = self._user_of(receive)
        self._wait.note(to_int(user, path.source))
        since = self._moment()
        with peer_failures("{} was waiting for rank {}", receive, path.source):
            for work in posted.works:
                work.wait()  # has the stream that computes wait, not the host
        self._wait.note(to_int(user))
        if self._recorder is not None and since is not None:
            self._recorder.waited(receive, since, self._recorder.moment())
        self._taken[receive] = posted.tensors
        if receive.kind is Kind.RECV_B:
            return GRADIENTS, self._ways.needed(receive, list(posted.tensors))
        if not self._form(receive).room:
            return self._ways.unpack(receive, posted.tensors)
        note = bytearray(self._hear_note(receive).encode())
        told = torch.frombuffer(note, dtype=torch.uint8)
        return self._ways.unpack(receive, [*posted.tensors, told])

    def release(self, receive: Action) -> None:
        self._ring(receive).put(self._taken.pop(receive))

    def send(self, send: Action, parcel: Parcel) -> None:
        meta, tensors = parcel
        for tensor in tensors:
            self._require_here(tensor, send)
        path = self._ways.way(send)
        if send.kind is Kind.SEND_F:
            # A note keeps hosts in step: not for a mask beside what is trained.
            tells_need = not meta.gradients
            form, is_new = self._ways.form_for(send, meta, tells_need=tells_need)
            if is_new:
                self._control.tell(path.target, form.to_json(), topic=boundary_of(send))
            if form.room:
                *_, packed = form.pack(meta, tensors, f"{send}")
                note = json.dumps([send.microbatch, packed.numpy().tobytes().decode()])
                self._control.tell(path.target, note, topic=_NOTES + boundary_of(send))
        tensors = [tensor.contiguous() for tensor in tensors]
        group, stream = self._groups.lane(path.lane), self._streams.sends[path.lane]
        stream.wait_event(self._device.current_stream().record_event())
        with (
            peer_failures("{} was going to rank {}", send, path.target),
            self._device.on(stream),
        ):
            since = self._moment()
            works = [group.send([tensor], path.target, 0) for tensor in tensors]
        self._sent[send] = _Transfer(tensors, works)
        self._see_end(send, works, since, self._streams.send_ends[path.lane])

    def ended(self, send: Action) -> None:
        """What computes waits for it, so that the tensors' memory is used again after it only."""
        sent = self._sent.pop(send)
        with peer_failures("{} was going to rank {}", send, self._ways.way(send).target):
            for work in sent.works:
                work.wait()

    def finish(self) -> None:
        """Wait until the device has done everything: then nothing that reads from it waits."""
        for send in list(self._sent):
            self.ended(send)
        self._control.finish()
        self._wait.for_all()
        require_unbroken(self._connections)

    @property
    def buffers(self) -> int:
        return self._rings.made

    @property
    def in_use(self) -> int:
        return len(self._posted) + len(self._taken) + len(self._sent)

    def interrupt(self) -> None:
        """Whoever waits here raises. Where a stage itself waits for its device, for a value of a
        tensor say, only breaking off what the device waits for can wake it."""
        self._wait.interrupt()
        abort_soon(self._device, self._groups, Lane)

    def forget(self) -> None:
        """Drop all transfers under way: after an error, or at the end."""
        self._ways.forget()
        self._wait.forget()
        self._posted.clear()
        self._taken.clear()
        self._sent.clear()
        self._notes.clear()
        self._connections = ()
        self._rings.clear()
        self._receives.forget()

    def _require_here(self, tensor: Tensor, send: Action) -> None:
        place = self._device.place
        if tensor.device != place:
            raise DataError(
                "what crosses between devices lies on them",
                f"{send} has a {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and this "
                f"rank's device is {place}",
                f"move it to {place} in the stage that returns it",
            )

    def _post_now(self, receive: Action) -> None:
        path = self._ways.way(receive)
        group = self._groups.lane(path.lane)
        with (
            peer_failures("{} was being posted for rank {}", receive, path.source),
            self._device.on(self._streams.receives[path.lane]),
        ):
            buffers = self._ring(receive).get()
            since = self._moment()
            works = [group.recv([buffer], path.source, 0) for buffer in buffers]
        self._posted[receive] = _Transfer(buffers, works)
        self._see_end(receive, works, since, self._streams.receive_ends[path.lane])

    def _moment(self) -> Event | None:
        return None if self._recorder is None else self._recorder.moment()

    def _see_end(
        self, transfer: Action, works: list[dist.Work], since: Event | None, stream: Stream
    ) -> None:
        """Note when a transfer has ended, on a stream that does nothing else."""
        if self._recorder is not None and since is not None:
            with self._device.on(stream):
                for work in works:
                    work.wait()
                self._recorder.span(transfer, since, self._recorder.moment())

    def _form(self, receive: Action) -> Form:
        form = self._ways.form(receive)
        assert form is not None, "a form is told before what it is of"
        return form

    def _ring(self, receive: Action) -> DeviceRing:
        form, lane = self._form(receive), self._ways.way(receive).lane
        wanted = form.gradients
        if receive.kind is Kind.RECV_F:  # the constants come another way
            wanted = form.tensors[:-1] if form.room else form.tensors
        return self._rings.get(
            (receive.kind, receive.stage, lane, wanted),
            lambda: DeviceRing(
                wanted,
                device=self._device,
                stream=self._streams.receives[lane],
                poison=self._poison,
            ),
        )

    def _hear_note(self, receive: Action) -> str:
        """The constants of a value; those of another microbatch may come first."""
        source, boundary = self._ways.way(receive).source, boundary_of(receive)
        wanted = (source, boundary, receive.microbatch)
        while wanted not in self._notes:
            text = self._control.hear(source, topic=_NOTES + boundary)
            microbatch, note = json.loads(text)
            self._notes[source, boundary, microbatch] = note
        return self._notes.pop(wanted)

    def _user_of(self, receive: Action) -> Action:
        """The action that a receive is for."""
        kind, stage, microbatch = receive
        if kind is Kind.RECV_F:
            return Action(Kind.F, stage, microbatch)
        return Action(Kind.I if (stage, microbatch) in self._split else Kind.B, stage, microbatch)
