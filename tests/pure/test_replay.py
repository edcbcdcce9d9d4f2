"""The simulation with the times that the steps of a run really took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npu_pipe import Action, Costs, Kind, ScheduleError, Timeline, build_schedule, lower, simulate
from npu_pipe.simulator.program import replay_program

COSTS = Costs.uniform(4, forward=5, input_grad=6, weight_grad=4, transfer=2)


def slower(timeline: Timeline, late: Action, by_us: float) -> Timeline:
    """The same window, but for one step that took longer; nothing else moved."""
    compute = tuple(
        span._replace(end_us=span.end_us + by_us) if span.action == late else span
        for span in timeline.compute
    )
    return Timeline(timeline.schedule, compute, timeline.transfers)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("overlapped", [True, False])
def test_what_was_simulated_is_replayed_as_it_was(name: str, overlapped: bool) -> None:
    costs = replace(COSTS, overlapped=overlapped)
    program = lower(build_schedule(name, ranks=4, microbatches=8), costs)
    timeline = simulate(program, costs)
    assert replay_program(program, timeline, costs) == timeline


def test_a_step_that_took_longer_delays_what_needs_it_and_nothing_before_it() -> None:
    program = lower(build_schedule("gpipe", ranks=4, microbatches=4), COSTS)
    timeline = simulate(program, COSTS)
    first = Action(Kind.F, 0, 0)  # of gpipe everything waits for it
    replayed = replay_program(program, slower(timeline, first, by_us=3), COSTS)
    for before, after in zip(timeline.compute, replayed.compute, strict=True):
        assert after.end_us == before.end_us + 3
    last = Action(Kind.F, 3, 3)
    replayed = replay_program(program, slower(timeline, last, by_us=3), COSTS)
    forwards = [span for span in replayed.compute if span.action.kind is Kind.F][:-1]
    assert forwards == [span for span in timeline.compute if span.action.kind is Kind.F][:-1]
    assert replayed.makespan == timeline.makespan + 3


def test_transfers_take_what_the_costs_say_and_not_what_was_measured() -> None:
    schedule = build_schedule("1f1b", ranks=4, microbatches=8)
    slow = Costs.uniform(4, forward=5, input_grad=6, weight_grad=4, transfer=9)
    measured = simulate(lower(schedule, slow), slow)
    program = lower(schedule, COSTS)
    assert replay_program(program, measured, COSTS) == simulate(program, COSTS)


def test_another_program_is_refused() -> None:
    program = lower(build_schedule("1f1b", ranks=4, microbatches=8), COSTS)
    measured = simulate(lower(build_schedule("1f1b", ranks=4, microbatches=6), COSTS), COSTS)
    with pytest.raises(ScheduleError, match="0F6 of the program was not measured"):
        replay_program(program, measured, COSTS)
