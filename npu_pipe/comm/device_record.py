"""DeviceRecorder: when things ran on a device, which may be long after the host asked for them.

Moments are events that the device passes. They become times when all of them have been passed:
each is as long before a last one, whose time is read on the host's clock, as the device says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec, TypeVar

from npu_pipe.comm.device_wait import DeviceWait
from npu_pipe.device.device import Device, Event
from npu_pipe.ir.action import Action
from npu_pipe.runtime.record import Recorder, now_us
from npu_pipe.timeline.phase import Phase

__all__ = ["DeviceRecorder"]

P = ParamSpec("P")
R = TypeVar("R")


class _Late(NamedTuple):
    """What will be appended to a list of the recorder, once its times are known."""

    append: Callable[[float, float], None]
    start: Event
    end: Event


class DeviceRecorder(Recorder):
    """As `Recorder`; its lists are complete after `settle`."""

    def __init__(self, device: Device, wait: DeviceWait) -> None:
        super().__init__()
        self._device = device
        self._wait = wait
        self._late: list[_Late] = []
        self._begun: Event | None = None

    def moment(self) -> Event:
        """Now, on the current stream."""
        event = self._device.event(timing=True)
        return self._device.current_stream().record_event(event)

    def begin(self, _action: Action, /) -> float:
        self._begun = self.moment()
        return now_us()

    def add(self, action: Action, start_us: float, end_us: float) -> None:
        """Of compute, the times are those of the device between `begin` and now."""
        if action.kind.is_compute and self._begun is not None:
            self.span(action, self._begun, self.moment())
        else:
            super().add(action, start_us, end_us)

    def span(self, action: Action, start: Event, end: Event) -> None:
        """As `add`, between two moments of any streams."""
        self._late.append(_Late(lambda s, e: self.events.append((action, s, e)), start, end))

    def waited(self, receive: Action, start: Event, end: Event) -> None:
        """As `wait`, between two moments of the stream that computes."""
        self._late.append(_Late(lambda s, e: self.waits.append((receive, s, e)), start, end))

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        start = self.moment()
        try:
            yield
        finally:
            self._spent(phase, start)

    def timed(self, phase: Phase, function: Callable[P, R]) -> Callable[P, R]:
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            with self.during(phase):
                return function(*args, **keywords)

        return call

    def settle(self) -> None:
        if not self._late:
            return
        last = self.moment()
        self._wait.for_all()
        zero_us = now_us()

        def us(event: Event) -> float:
            return zero_us - 1e3 * event.elapsed_time(last)

        for each in self._late:
            each.append(us(each.start), us(each.end))
        self._late.clear()

    def _spent(self, phase: Phase, start: Event) -> None:
        self._late.append(
            _Late(lambda s, e: self.phases.append((phase, s, e)), start, self.moment())
        )
