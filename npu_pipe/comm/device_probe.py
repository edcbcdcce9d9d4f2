"""Whether a device still does what it is given.

Between host and device lies a queue. When work in it fails, the next one who gives it work is
told, but only that one, and it may be a thread of the device's library. From then on nothing is
done any more, without a word. Either the queue drops what it is given: an event that is recorded
now seems to have been passed at once, but a value that was to come back before it has not. Or it
keeps it: then it looks as one that is slow, which compiles an operator say, and only time tells.
"""

from __future__ import annotations

import time

import torch

from npu_pipe.device.device import Device

__all__ = ["DeviceProbe"]

_PAUSE_S = 1.0  # from one question to the next
_DEAD_S = 300.0  # compiling the operators of a first step takes less


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
        is_back = self._back.query()
        waited_s = time.monotonic() - self._asked_s
        if waited_s > _DEAD_S or (is_back and int(self._here) != self._given):
            raise RuntimeError(
                "the device does nothing any more: work in its queue has failed, which was told to "
                "a thread of its library"
            )
        if is_back and waited_s > _PAUSE_S:
            self._ask()

    def _ask(self) -> None:
        self._asked_s = time.monotonic()
        self._given += 1
        with self._device.on(self._stream):
            self._there.fill_(self._given)
            self._here.copy_(self._there, non_blocking=True)
        self._back = self._stream.record_event()
