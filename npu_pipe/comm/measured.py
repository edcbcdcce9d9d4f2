"""Gathering what the ranks recorded: one timeline on one clock, one footprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from npu_pipe.comm.part import part_of
from npu_pipe.comm.team import Team
from npu_pipe.errors import ConfigError
from npu_pipe.ir.action import parse_step
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.memory import MemoryRecorder, StageBytes
from npu_pipe.runtime.record import Event, Recorder, now_us
from npu_pipe.simulator.footprint import Footprint
from npu_pipe.simulator.memory import Memory
from npu_pipe.timeline.phase import Phase, PhaseSpan
from npu_pipe.timeline.timeline import Span, Timeline

__all__ = ["clock_offset_us", "gather_footprint", "gather_timeline"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def clock_offset_us(team: Team) -> float:
    """What to subtract from this rank's clock to get rank 0's.

    0 on rank 0's machine, where the clock is the same. On another one, as good as the spread of
    the ranks' return from a common meeting: the best of several.
    """
    machine = _BOOT_ID.read_text() if _BOOT_ID.exists() else f"rank {team.rank}"
    machines = team.gather(machine)
    offsets = []
    for _ in range(8):
        team.gather(None)
        clocks = team.gather(now_us())
        offsets.append(clocks[team.rank] - clocks[0])
    return 0.0 if machines[team.rank] == machines[0] else sorted(offsets)[len(offsets) // 2]


def gather_timeline(
    schedule: Schedule,
    recorder: Recorder,
    *,
    gather: Callable[[Any], list[Any]],
    offset_us: float,
) -> Timeline:
    """The timeline of the window that was recorded; time 0 is its first event or wait.

    A transfer's span runs from when its side was ready to when its end was seen, which may be
    later than when it came.
    gather: value of each rank -> values of all, on every rank.
    """
    recorder.settle()
    # Later parts are waited for within the action that uses them, and count as a part of it.
    first_waits = [each for each in recorder.waits if part_of(each[0]) <= 0]
    kinds = (_joined(recorder.events), first_waits, recorder.phases)
    mine = [
        [(str(name), start - offset_us, end - offset_us) for name, start, end in kind]
        for kind in kinds
    ]
    everything = gather(mine)
    starts = (start for events, waits, _ in everything for _, start, _ in (*events, *waits))
    zero = min(starts, default=0.0)
    compute: list[Span] = []
    transfers: list[Span] = []
    waits: list[Span] = []
    phases: list[PhaseSpan] = []
    for rank, (events, waited, spent) in enumerate(everything):
        for text, start, end in events:
            span = Span(rank, parse_step(text), start - zero, end - zero)
            (compute if span.is_compute else transfers).append(span)
        waits += [Span(rank, parse_step(text), s - zero, e - zero) for text, s, e in waited]
        phases += [PhaseSpan(rank, Phase(text), s - zero, e - zero) for text, s, e in spent]
    return Timeline(schedule, tuple(compute), tuple(transfers), tuple(waits), tuple(phases))


def _joined(events: list[Event]) -> list[Event]:
    """A transfer that went in parts is one event, from the start of the first that began to the
    end of the last."""
    found = [event for event in events if part_of(event[0]) < 0]
    spans: dict[str, Event] = {}
    for part, start_us, end_us in events:
        if part_of(part) >= 0:
            _, first_us, last_us = spans.get(str(part), (part, start_us, end_us))
            spans[str(part)] = part, min(first_us, start_us), max(last_us, end_us)
    return found + list(spans.values())


def gather_footprint(
    schedule: Schedule, recorder: Recorder, *, gather: Callable[[Any], list[Any]]
) -> Footprint:
    """What the ranks held in the window that was recorded. Collective.

    Raises ConfigError, on every rank, where one has not watched its memory in it.
    """
    mine = None
    if isinstance(recorder, MemoryRecorder):
        mine = {
            "stages": {str(stage): found for stage, found in recorder.stages().items()},
            "held": recorder.held + recorder.parameters,
            "highest": recorder.highest + recorder.parameters,
        }
    everything = gather(mine)
    if None in everything:
        raise ConfigError(
            "a footprint is of a step in which all ranks watched their memory",
            f"rank {everything.index(None)} did not in the last one",
            "run the step inside `with pipe.watching_memory():`, on every rank",
        )
    placement = schedule.placement
    stages = [StageBytes(*everything[rank]["stages"][str(s)]) for s, rank in enumerate(placement)]
    memory = Memory(
        activation=[stage.kept for stage in stages],
        weight_inputs=[stage.kept_for_weights for stage in stages],
        parameters=[stage.parameters for stage in stages],
        boundary=[stage.output for stage in stages[:-1]],
    )
    return Footprint(
        memory,
        tuple(each["held"] for each in everything),
        tuple(each["highest"] for each in everything),
    )
