"""SharedLink: the transfers of one rank to the ranks of the same host, through shared memory.

    rank 0   2F3 done: copied into a slot ---- number of the slot ---> rank 1   used where it lies,
             (memory of both)                  (local socket)                   then freed

One copy, a large one in a thread beside: what gloo does for ranks anywhere, it does with two
copies through the network stack and a thread at each end. A message is sent when it is there, and
waits for nobody; how many can be under way, the schedule bounds.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from npu_pipe.comm.copier import Copier
from npu_pipe.comm.descriptor import FILE_BYTES, file_of, with_file
from npu_pipe.comm.ring import fill_with_nan
from npu_pipe.comm.slots import Layout, Mapped, Slab, Slot, Slots, layout_of
from npu_pipe.comm.unused import marked, unmarked
from npu_pipe.comm.ways import GRADIENTS, Ways
from npu_pipe.errors import PeerError
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.executor import Parcel
from npu_pipe.runtime.form import Form, form_from_json
from npu_pipe.runtime.record import Recorder, now_us

__all__ = ["Pace", "SharedLink"]

# A message is one of: a slot that is filled, with the times of its filling; memory for more
# slots; the form of what the next slot holds, or a word for all: the last part of it, or another.
_FILLED, _SLAB, _FORM, _WORD, _PART = range(5)
_Filled = struct.Struct("=Bxxxidd")
_Slab = struct.Struct("=Bxxxiiq")
_PART_BYTES = 1 << 16  # of a message; a socket takes at least twice as many
_LARGE_BYTES = 1 << 19  # what takes longer to copy than to have copied beside
_LAYOUTS = 1024  # that are remembered


@dataclass(frozen=True, slots=True)
class Pace:
    """A slower wire, to see on one host what a network would do.

    A message is under way for latency_us + bytes / bytes_per_us; those of one rank to another
    follow one another on the wire.
    """

    latency_us: float
    bytes_per_us: float


class _Arrived(NamedTuple):
    slot: Slot
    start_us: float
    end_us: float


class _Peer:
    """Another rank: what goes there, and what comes from there."""

    def __init__(self, rank: int, pair: socket.socket) -> None:
        self.rank = rank
        self.pair = pair
        self.slots = Slots()
        self.mapped: Mapped | None = None
        self.expected: deque[Action] = deque()  # receives asked for, in the order of the lane
        self.parts: list[bytes] = []
        self.words: deque[str] = deque()
        self.unsent: deque[tuple[bytes, int | None]] = deque()  # while the socket takes no more
        self.wire_free_us = 0.0
        self._sending = threading.Lock()
        self.tell(bytes([_SLAB]), self.slots.flags_file)

    def tell(self, message: bytes, file: int | None = None) -> None:
        """Send, or keep for later what the socket does not take: never waits."""
        self.unsent.append((message, file))
        self.flush()

    def tell_text(self, kind: int, text: str) -> None:
        """Send a text of any length."""
        encoded = text.encode()
        *parts, last = range(0, max(1, len(encoded)), _PART_BYTES)
        for start in parts:
            self.tell(bytes([_PART]) + encoded[start : start + _PART_BYTES])
        self.tell(bytes([kind]) + encoded[last:])

    def flush(self) -> None:
        with self._sending:
            while self.unsent:
                message, file = self.unsent[0]
                files = [] if file is None else [with_file(file)]
                try:
                    self.pair.sendmsg([message], files, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except OSError as error:
                    raise _lost(f"something was going to rank {self.rank}", error) from error
                self.unsent.popleft()
                if file is not None:
                    os.close(file)

    def flush_all(self) -> None:
        """Wait until the socket has taken everything."""
        self.flush()
        while self.unsent:
            _wait_for({self.pair: select.POLLOUT})
            self.flush()


class SharedLink:
    """See `npu_pipe.runtime.executor.Link`, which this is."""

    copies = True
    tells_unused = True

    def copies_at_once(self, tensors: Sequence[Tensor]) -> bool:
        return sum(tensor.nbytes for tensor in tensors) < _LARGE_BYTES

    def __init__(
        self,
        rank: int,
        pairs: Mapping[int, socket.socket],
        *,
        poison: bool = False,
        pace: Pace | None = None,
    ) -> None:
        """pairs: by rank, a connection to each other one; see `connect_pairs`.
        poison: fill free slots with NaN. pace: of the wire, if it shall be slower than memory."""
        self._pace = pace
        self._poison = poison
        self._rank = rank
        self._ways = Ways()
        self._recorder = Recorder()
        self._peers = {rank: _Peer(rank, pair) for rank, pair in pairs.items()}
        self._arrived: dict[Action, _Arrived] = {}
        self._taken: dict[Action, Slot] = {}
        self._layouts: dict[int, tuple[Form, Layout, Layout]] = {}  # by the form's identity
        self._buffer = bytearray(1 + _PART_BYTES)
        self._copier = Copier()

    def recorder(self) -> Recorder:
        return Recorder()

    def start_window(
        self, schedule: Schedule, signatures: Sequence[str], recorder: Recorder
    ) -> None:
        self._ways.start_window(schedule, signatures)
        self._recorder = recorder

    def post(self, receive: Action) -> None:
        self._peers[self._ways.way(receive).source].expected.append(receive)

    def take(self, receive: Action) -> Parcel:
        if receive not in self._arrived:
            since_us = now_us()
            peer = self._peers[self._ways.way(receive).source]
            while receive not in self._arrived:
                self._read(peer, receive)
            self._recorder.wait(receive, since_us, now_us())
        slot, start_us, end_us = self._arrived.pop(receive)
        if self._pace is not None:
            self._await(receive, end_us)
        self._taken[receive] = slot
        self._recorder.add(receive, start_us, end_us)
        form = self._ways.form(receive)
        assert form is not None, "a form is told before what it is of"
        tensors = slot.tensors(self._layout(form, receive))
        if receive.kind is Kind.RECV_B:
            return GRADIENTS, self._ways.needed(receive, unmarked(tensors))
        return self._ways.unpack(receive, list(tensors))

    def release(self, receive: Action) -> None:
        mapped = self._peers[self._ways.way(receive).source].mapped
        assert mapped is not None
        self._do(partial(self._free, mapped, self._taken.pop(receive)))

    def send(self, send: Action, parcel: Parcel) -> None:
        start_us = now_us()
        self._copier.check()
        meta, tensors = parcel
        peer = self._peers[self._ways.way(send).target]
        if send.kind is Kind.SEND_F:
            form, is_new = self._ways.form_for(send, meta)
            if is_new:
                self._do(partial(peer.tell_text, _FORM, form.to_json()))
            if form.room:
                tensors = form.pack(meta, tensors, f"{send}")
        else:
            known = self._ways.form(send)
            assert known is not None, "a gradient's form is known from its activation"
            form, tensors = known, marked(tensors)
        layout = self._layout(form, send)
        slot, slab = peer.slots.get(layout.nbytes)
        if slab is not None:
            message = _Slab.pack(_SLAB, slab.first, slab.count, slab.capacity)
            self._do(partial(peer.tell, message, slab.file))
        fill = partial(self._fill, self._recorder, send, peer, slot, layout, tensors, start_us)
        self._do(fill, takes_long=layout.nbytes >= _LARGE_BYTES)

    def ended(self, send: Action) -> None:
        """It had ended when it was issued: the slot holds a copy."""

    def finish(self) -> None:
        self._copier.finish()
        for peer in self._peers.values():
            peer.flush_all()

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank, on every rank. All ranks call it, between two windows."""
        word = json.dumps(value)
        for peer in self._peers.values():
            peer.tell_text(_WORD, word)
        found = {}
        for rank, peer in self._peers.items():
            while not peer.words:
                self._read(peer, "a meeting")
            found[rank] = peer.words.popleft()
        found[self._rank] = word
        return [json.loads(found[rank]) for rank in sorted(found)]

    @property
    def buffers(self) -> int:
        return sum(peer.slots.made for peer in self._peers.values())

    @property
    def in_use(self) -> int:
        return len(self._arrived) + len(self._taken) + self._copier.is_busy

    def interrupt(self) -> None:
        """Have the main thread raise where it waits; for another thread to call."""
        for peer in list(self._peers.values()):
            with suppress(OSError):
                peer.pair.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Leave: after an error, or at the end."""
        self.interrupt()  # the copier may wait for a socket
        self._copier.close()
        for peer in self._peers.values():
            peer.pair.close()
        self._peers.clear()
        self._arrived.clear()
        self._taken.clear()

    def _do(self, job: Callable[[], None], *, takes_long: bool = False) -> None:
        """Now, or after what the copier has been asked for: all is done in one order.

        One large copy at a time: what is being copied is then the last output at most, so a
        module may return two or more buffers in turn.
        """
        if takes_long:
            self._copier.finish()
        if takes_long or self._copier.is_busy:
            self._copier.ask(partial(self._do_beside, job))
        else:
            job()

    def _do_beside(self, job: Callable[[], None]) -> None:
        """In the copier. It may wait for a socket, of which the main thread would not know."""
        job()
        for peer in list(self._peers.values()):
            peer.flush_all()

    def _free(self, mapped: Mapped, slot: Slot) -> None:
        if self._poison:
            fill_with_nan(slot.memory)
        mapped.free(slot)

    def _fill(
        self,
        recorder: Recorder,
        send: Action,
        peer: _Peer,
        slot: Slot,
        layout: Layout,
        tensors: Sequence[Tensor],
        start_us: float,
    ) -> None:
        for place, tensor in zip(slot.tensors(layout), tensors, strict=True):
            place.copy_(tensor)
        end_us = now_us()
        if self._pace is not None:
            start_us = max(end_us, peer.wire_free_us)
            peer.wire_free_us = start_us + layout.nbytes / self._pace.bytes_per_us
            end_us = peer.wire_free_us + self._pace.latency_us
        peer.tell(_Filled.pack(_FILLED, slot.number, start_us, end_us))
        recorder.add(send, start_us, end_us)

    def _await(self, receive: Action, end_us: float) -> None:
        since_us = now_us()
        if since_us < end_us:
            # A sleep alone lasts up to 0.1 ms longer than asked, and a wire does not.
            time.sleep(max(0.0, (end_us - since_us - 200) / 1e6))
            while now_us() < end_us:
                pass
            self._recorder.wait(receive, since_us, now_us())

    def _layout(self, form: Form, transfer: Action) -> Layout:
        found = self._layouts.get(id(form))
        if found is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            found = form, layout_of(form.tensors), layout_of(form.gradients)
            self._layouts[id(form)] = found
        return found[1] if transfer.kind in (Kind.SEND_F, Kind.RECV_F) else found[2]

    def _read(self, peer: _Peer, awaited: Action | str) -> None:
        """Wait for one message of a rank, and go on sending meanwhile."""
        self._drain(peer)
        space = memoryview(self._buffer)
        try:
            count, extra, _, _ = peer.pair.recvmsg_into([space], FILE_BYTES)
        except OSError as error:
            raise _lost(f"{awaited} was waiting for rank {peer.rank}", error) from error
        if count == 0:
            closed = ConnectionError("it has closed the connection")
            raise _lost(f"{awaited} was waiting for rank {peer.rank}", closed)
        kind = space[0]
        if kind == _FILLED:
            _, number, start_us, end_us = _Filled.unpack_from(space)
            assert peer.mapped is not None
            arrived = _Arrived(peer.mapped[number], start_us, end_us)
            self._arrived[peer.expected.popleft()] = arrived
        elif kind in (_WORD, _FORM, _PART):
            peer.parts.append(bytes(space[1:count]))
            if kind == _PART:
                return
            text = b"".join(peer.parts).decode()
            peer.parts.clear()
            if kind == _WORD:
                peer.words.append(text)
            else:
                self._ways.learn(peer.expected[0], form_from_json(text))
        else:
            file = file_of(extra)
            try:
                if peer.mapped is None:
                    peer.mapped = Mapped(file)
                else:
                    _, first, slots, capacity = _Slab.unpack_from(space)
                    peer.mapped.add(Slab(first, slots, capacity, file))
            finally:
                os.close(file)

    def _drain(self, awaited: _Peer) -> None:
        """Before waiting for one rank: what others have not been sent yet goes on meanwhile."""
        while unsent := [peer for peer in self._peers.values() if peer.unsent]:
            events = dict.fromkeys((peer.pair for peer in unsent), select.POLLOUT)
            events[awaited.pair] = events.get(awaited.pair, 0) | select.POLLIN
            ready = _wait_for(events)
            for peer in unsent:
                peer.flush()
            if ready.get(awaited.pair.fileno(), 0) & ~select.POLLOUT:
                return


def _wait_for(events: Mapping[socket.socket, int]) -> dict[int, int]:
    """Until one of them happens; by file descriptor, of which select knows only the low ones."""
    asked = select.poll()
    for pair, event in events.items():
        asked.register(pair, event)
    return dict(asked.poll())


def _lost(what: str, error: OSError) -> PeerError:
    return PeerError(
        "every rank stays alive and connected until the job ends",
        f"{what}: {error}",
        "look for the rank that failed first: its own error tells why",
    )
