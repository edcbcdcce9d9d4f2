"""Recording when things ran: two clock readings and an append each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeAlias, TypeVar

from npu_pipe.ir.action import Action
from npu_pipe.timeline.phase import Phase

__all__ = ["Event", "PhaseEvent", "Recorder", "now_us"]

P = ParamSpec("P")
R = TypeVar("R")


Event: TypeAlias = tuple[Action, float, float]
"""An action or transfer, its start and its end on this rank's clock, in microseconds since an
arbitrary moment. No class of its own: that would take longer to make than all the rest."""

PhaseEvent: TypeAlias = tuple[Phase, float, float]
"""A phase likewise."""


def now_us() -> float:
    """The monotonic clock, common to all processes of a host."""
    return time.perf_counter_ns() / 1e3


class Recorder:
    """The events of one window on one rank, and the phases of its step.

    waits: per receive, from when the rank began to take it until it had it.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.waits: list[Event] = []
        self.phases: list[PhaseEvent] = []

    def begin(self, _action: Action, /) -> float:
        """An action of compute begins; the time."""
        return time.perf_counter_ns() / 1e3  # as now_us, without another call

    def settle(self) -> None:
        """Have all that was recorded in the lists; it is, where nothing runs after it was asked."""

    def add(self, action: Action, start_us: float, end_us: float) -> None:
        self.events.append((action, start_us, end_us))

    def wait(self, receive: Action, start_us: float, end_us: float) -> None:
        self.waits.append((receive, start_us, end_us))

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Record what the block takes, whether it ends well or not."""
        start_us = now_us()
        try:
            yield
        finally:
            self.phases.append((phase, start_us, now_us()))

    def timed(self, phase: Phase, function: Callable[P, R]) -> Callable[P, R]:
        """The function, each call of which is recorded as this phase."""

        def call(*args: P.args, **keywords: P.kwargs) -> R:
            start_us = now_us()
            try:
                return function(*args, **keywords)
            finally:
                self.phases.append((phase, start_us, now_us()))

        return call
