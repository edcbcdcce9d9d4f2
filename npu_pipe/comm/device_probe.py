"""Whether a device still does what it is given.

Between host and device lies a queue. When work in it fails, the next one who gives it work is
told, but only that one, and it may be a thread of the device's library, or the end of an object,
which keeps it to itself. From then on nothing is done any more, without a word. So a number is sent
to the device and back:

    it is said to be back, and is not         the queue drops what it is given
    it is not back for a while                the device is slow, compiles an operator say, or dead:
                                              one that is slow has not come to its end. If the
                                              library says that all has been done, it is dead
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import torch

from npu_pipe.device.device import Device

__all__ = ["DeviceProbe"]

_PAUSE_S = 1.0  # from one question to the next
_SLOW_S = 2.0  # after which the library is asked: that may hold others up, so not before


class DeviceProbe:
    """A number that travels to the device and back, on a stream of its own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        with device.on(self._stream):
            self._there = torch.zeros(1, dtype=torch.int32, device=device.place)
        self._here = torch.zeros(1, dtype=torch.int32, pin_memory=device.place.type != "cpu")
        self._given = 0
        self._ask()

    def look(self) -> None:
        """Raise RuntimeError if the device does nothing any more, or what it says on being asked.
        For who waits for the device: to be called again and again."""
        waited_s = time.monotonic() - self._asked_s
        if self._back.query() or self._is_at_its_end(waited_s):
            if int(self._here) != self._given:
                raise RuntimeError(
                    "the device does nothing any more: work in its queue has failed, which was "
                    "told to a part of its library"
                )
            if waited_s > _PAUSE_S:
                self._ask()

    def _ask(self) -> None:
        self._asked_s = time.monotonic()
        self._given += 1
        with self._device.on(self._stream):
            self._there.fill_(self._given)
            self._here.copy_(self._there, non_blocking=True)
        self._back = self._stream.record_event()
        self._end: Future[None] | None = None

    def _is_at_its_end(self, waited_s: float) -> bool:
        """Whether the library says that all has been done; raises what it raises."""
        if self._end is None and waited_s > _SLOW_S:
            self._end = Future()
            threading.Thread(target=self._wait, args=(self._end,), daemon=True).start()
        if self._end is None or not self._end.done():
            return False
        self._end.result()
        return True

    def _wait(self, end: Future[None]) -> None:
        """Beside who asks: nothing interrupts the library, which first empties its queue."""
        try:
            self._device.select()
            self._stream.synchronize()
        except Exception as error:
            end.set_exception(error)
        else:
            end.set_result(None)
