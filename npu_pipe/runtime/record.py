"""Recording when things ran: two clock readings and an append each."""

from __future__ import annotations

import time
from typing import NamedTuple

from npu_pipe.ir.action import Action

__all__ = ["Event", "Recorder", "now_us"]


class Event(NamedTuple):
    """An action or transfer on this rank's clock, in microseconds since an arbitrary moment."""

    action: Action
    start_us: float
    end_us: float


def now_us() -> float:
    """The monotonic clock, common to all processes of a host."""
    return time.perf_counter_ns() / 1e3


class Recorder:
    """The events of one window on one rank."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, action: Action, start_us: float, end_us: float) -> None:
        self.events.append(Event(action, start_us, end_us))
