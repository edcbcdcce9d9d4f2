"""The table compares a measured window with what its own costs predict."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from npu_pipe import Costs, build_schedule, lower, simulate
from npu_pipe.planner.changes import unfused
from npu_pipe.timeline.timeline import Span, Timeline
from npu_pipe.train.report import measured_costs, predict, report

COSTS = Costs(
    forward=[100, 200, 300, 150],
    input_grad=[210, 400, 500, 250],
    weight_grad=[0, 0, 0, 0],
    transfer=[10, 20, 30],
)


def ran(name: str, ranks: int, chunks: int | None = None) -> Timeline:
    schedule = build_schedule(name, ranks=ranks, microbatches=8, chunks=chunks)
    return simulate(lower(schedule, COSTS), COSTS)


@pytest.mark.parametrize(("name", "ranks"), [("gpipe", 4), ("1f1b", 4), ("interleaved-1f1b", 2)])
def test_a_window_that_went_as_predicted_gives_its_costs_back(name: str, ranks: int) -> None:
    measured = ran(name, ranks)
    found = measured_costs(measured)
    assert found.forward == pytest.approx(COSTS.forward)
    assert found.input_grad == pytest.approx(COSTS.input_grad)
    assert found.weight_grad == (0, 0, 0, 0)
    assert found.transfer == pytest.approx(COSTS.transfer)
    assert predict(measured).makespan == pytest.approx(measured.makespan)


def test_one_slow_microbatch_does_not_change_the_costs() -> None:
    measured = ran("gpipe", 4)
    compute = tuple(
        span._replace(end_us=span.end_us + 1e6) if str(span.action) == "3F7" else span
        for span in measured.compute
    )
    slow = Timeline(measured.schedule, compute, measured.transfers)
    assert measured_costs(slow).forward == pytest.approx(COSTS.forward)


def test_whole_and_split_backwards_of_one_stage_are_not_added() -> None:
    """As DualPipe has them."""
    schedule = build_schedule("dualpipe-v", ranks=4, microbatches=8)
    costs = Costs.uniform(schedule.stages, forward=100, input_grad=110, weight_grad=90)
    found = measured_costs(simulate(unfused(schedule), costs))
    assert (found.input_grad, found.weight_grad) == (costs.input_grad, costs.weight_grad)


def test_a_single_stage_has_no_boundary() -> None:
    schedule = build_schedule("gpipe", ranks=1, microbatches=1)
    forward, backward = schedule.orders[0]
    timeline = Timeline(schedule, (Span(0, forward, 0, 2), Span(0, backward, 2, 5)))
    assert measured_costs(timeline) == Costs([2], [3], [0], [])


def test_a_row_a_rank() -> None:
    measured = ran("1f1b", 4)
    out = io.StringIO()
    Console(file=out, width=100).print(report(predict(measured), measured))
    lines = out.getvalue().splitlines()
    assert all(line == line.rstrip() for line in lines)
    rows = [line.split() for line in lines]
    cells = {row[1]: [cell for cell in row if cell != "│"] for row in rows if "│" in row}
    bubbles = [1 - busy / measured.makespan for busy in measured.busy_us]
    for rank in range(4):
        share = f"{bubbles[rank]:.1%}"
        peak = str(4 - rank)
        assert cells[str(rank)] == [str(rank), str(rank), share, share, peak, peak]
    share = f"{measured.bubble_ratio:.1%}"
    assert cells["all"] == ["all", "4", share, share, "4", "4"]
