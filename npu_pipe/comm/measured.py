"""Gathering what the ranks recorded into one timeline on one clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from npu_pipe.comm.control import Control
from npu_pipe.ir.action import Action, parse_step
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.record import Event, now_us
from npu_pipe.timeline.timeline import Span, Timeline

__all__ = ["clock_offset_us", "gather_timeline"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def clock_offset_us(control: Control) -> float:
    """What to subtract from this rank's clock to get rank 0's.

    0 on rank 0's machine, where the clock is the same. On another one, as good as the spread of
    the ranks' return from a common meeting: the best of several.
    """
    machine = _BOOT_ID.read_text() if _BOOT_ID.exists() else f"rank {control.rank}"
    machines = control.gather(machine)
    offsets = []
    for _ in range(8):
        control.gather(None)
        clocks = control.gather(now_us())
        offsets.append(clocks[control.rank] - clocks[0])
    return 0.0 if machines[control.rank] == machines[0] else sorted(offsets)[len(offsets) // 2]


def gather_timeline(
    schedule: Schedule,
    events: Sequence[Event],
    *,
    gather: Callable[[Any], list[Any]],
    offset_us: float,
) -> Timeline:
    """The timeline of the window in which these events were recorded; time 0 is its first event.

    A transfer's span runs from when its side was ready to when its end was seen, which may be
    later than when it came.
    gather: value of each rank -> values of all, on every rank.
    """
    mine = [(str(action), start - offset_us, end - offset_us) for action, start, end in events]
    everything = gather(mine)
    zero = min((start for events in everything for _, start, _ in events), default=0.0)
    compute: list[Span] = []
    transfers: list[Span] = []
    for rank, recorded in enumerate(everything):
        for text, start, end in recorded:
            action = parse_step(text)
            assert isinstance(action, Action)
            track = compute if action.kind.is_compute else transfers
            track.append(Span(rank, action, start - zero, end - zero))
    return Timeline(schedule, tuple(compute), tuple(transfers))
