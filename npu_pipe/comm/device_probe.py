"""Whether a device still does what it is given.

Between host and device lies a queue. When work in it fails, the next one who gives it work is
told, but only that one, and it may be a thread of the device's library, or the end of an object,
which keeps it to itself. From then on the queue drops what it is given, without a word. It then
looks as one that is slow, which compiles an operator say. But one that is slow has not come to its
end: so a number is sent to the device and back, and when the library says that the device has done
all it was given, the number has come back, or the device does nothing any more.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import torch

from npu_pipe.device.device import Device

__all__ = ["DeviceProbe"]

_PAUSE_S = 1.0  # from one question to the next


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
        if not self._done.done():
            return
        self._done.result()
        if int(self._here) != self._given:
            raise RuntimeError(
                "the device does nothing any more: work in its queue has failed, which was told to "
                "a part of its library"
            )
        if time.monotonic() > self._asked_s + _PAUSE_S:
            self._ask()

    def _ask(self) -> None:
        self._asked_s = time.monotonic()
        self._given += 1
        with self._device.on(self._stream):
            self._there.fill_(self._given)
            self._here.copy_(self._there, non_blocking=True)
        self._done: Future[None] = Future()
        threading.Thread(target=self._wait, args=(self._done,), daemon=True).start()

    def _wait(self, done: Future[None]) -> None:
        """Beside who asks: nothing interrupts the library, which first empties its queue."""
        try:
            self._device.select()
            self._stream.synchronize()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
