"""Naming actions in a profile, while one is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from npu_pipe.device.device import Device
from npu_pipe.ir.action import Action
from npu_pipe.runtime.executor import Clock

__all__ = ["named"]


@contextmanager
def named(clock: Clock, device: Device) -> Iterator[Clock]:
    """The clock itself, or one that names each action in the profile that is being taken.

    Whether there is one is asked once: nothing is lost where there is none.
    """
    if not device.is_profiled():
        yield clock
        return
    naming = _NamingClock(clock, device)
    try:
        yield naming
    finally:
        naming.close()  # an action may have failed


class _NamingClock:
    def __init__(self, clock: Clock, device: Device) -> None:
        self._clock = clock
        self._device = device
        self._range: AbstractContextManager[object] | None = None

    def begin(self, action: Action, /) -> float:
        start_us = self._clock.begin(action)
        self._range = self._device.range(action)
        self._range.__enter__()
        return start_us

    def add(self, action: Action, start_us: float, end_us: float, /) -> None:
        self.close()
        self._clock.add(action, start_us, end_us)

    def close(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
