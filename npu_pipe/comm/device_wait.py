"""Waiting on the host for a device that may never get there.

Nothing wakes a thread that waits inside the device's own library. So before anything is read
from the device, the host asks again and again whether the device has come so far, and the watch
can interrupt that.

The host may be far ahead of its device. What counts as progress, for the watch of every rank, is
where the device is: so points of the program are noted with an event each, and the board shows
the last one that the device has passed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TypeVar

from npu_pipe.comm.board import Board
from npu_pipe.comm.device_probe import DeviceProbe
from npu_pipe.device.device import Device, Event
from npu_pipe.errors import PeerError

__all__ = ["DeviceWait"]

_AHEAD = 64  # points that the host may be ahead of the device: queues of streams are bounded
_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 5e-4  # between two looks, the longer the longer it takes
_LOOK_S = 0.05  # how late an interruption is noticed while the device's library is called

T = TypeVar("T")


class DeviceWait:
    """The points of one rank's program that its device has not passed yet."""

    def __init__(self, device: Device, board: Board) -> None:
        self._device = device
        self._board = board
        self._points: deque[tuple[Event, int]] = deque()
        self._interrupted = threading.Event()
        self._failure: RuntimeError | None = None
        self._passed = 0
        self._probe: DeviceProbe | None = None

    def note(self, mark: int) -> None:
        """A point of the current stream: once passed, the rank is at `mark`."""
        # A new one each time: after an error, one that was used before looks as if it had passed.
        self._points.append((self._device.current_stream().record_event(), mark))

    def for_room(self) -> None:
        """Wait until the host is not too far ahead."""
        self._until(_AHEAD)

    def for_all(self) -> None:
        """Wait until the device has done all that was given to the current stream. Raises
        RuntimeError if it failed at some of it, but for transfers, which only their communicator
        knows of.

        When its queue has failed, points that were noted before look as if they had been passed,
        and one that is noted after raises, or is never passed: hence two. That the stream has
        failed is told by waiting for it, which takes no time then.
        """
        for _ in range(2):
            self.note(0)
            self._until(0)
        self._device.current_stream().synchronize()

    def beside(self, work: Callable[[], T]) -> T:
        """Do, on the current stream, what may hold its thread up in the device's library for ever,
        as setting up a communicator with a rank that has died. Raises what it raises, or PeerError
        if interrupted before it has ended."""
        future: Future[T] = Future()
        stream = self._device.current_stream()

        def run() -> None:
            try:
                self._device.select()
                with self._device.on(stream):
                    future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not future.done():
            self.require_unbroken()
            wait_for((future,), timeout=_LOOK_S)
        return future.result()

    def require_unbroken(self) -> None:
        """Raise PeerError if interrupted, and RuntimeError if `look` was told that the device has
        failed."""
        if self._failure is not None:
            raise self._failure
        if self._interrupted.is_set():
            raise PeerError(
                "every rank runs its part of a call to the end",
                "this rank's transfers were interrupted",
                "look for the rank that failed first: its own error tells why",
            )

    def interrupt(self) -> None:
        """Have whoever waits here, now or later, raise PeerError; called by another thread."""
        self._interrupted.set()

    def look(self) -> None:
        """Show on the board what the device is at, if it is behind the host; called by another
        thread, since the host may be held up by the device, in a stage that asks for a value."""
        try:
            points = list(self._points)
        except RuntimeError:  # they have changed meanwhile: the host is not held up
            return
        if not points:  # a failure is told once: not to who waits for nothing
            return
        try:
            self._device.select()
            mark = self._passed
            for event, after in points:
                if not event.query():
                    if mark:
                        self._board.cells[0] = mark
                    return
                mark = after
        except RuntimeError as error:  # told once, to this thread: who waits here is to raise it
            self._failure = error

    def forget(self) -> None:
        self._points.clear()

    def _until(self, remaining: int) -> None:
        while len(self._points) > remaining:
            event, mark = self._points[0]
            self._wait_for(event)
            self._points.popleft()
            self._passed = self._board.cells[0] = mark
        self.require_unbroken()

    def _wait_for(self, event: Event) -> None:
        begun_s, pause_s = time.monotonic(), _PAUSE_S
        while not event.query():
            self.require_unbroken()
            if time.monotonic() > begun_s + _LOOK_S:
                self._probe = self._probe or DeviceProbe(self._device)
                self._probe.look()
            self._interrupted.wait(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
