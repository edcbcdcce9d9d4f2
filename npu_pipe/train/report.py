"""Predicted and measured, side by side, for each rank."""

from __future__ import annotations

from statistics import median

from rich.table import Table

from npu_pipe.api import simulate
from npu_pipe.ir.action import Kind, flatten
from npu_pipe.ir.program import peer_of
from npu_pipe.simulator.costs import Costs
from npu_pipe.timeline.timeline import Timeline

__all__ = ["measured_costs", "predict", "report"]


def measured_costs(timeline: Timeline) -> Costs:
    """What each stage and boundary took in a measured window of training.

    Compute: the median over microbatches; all of a whole backward counts as its input half, where
    a stage has no halves of its own.
    A transfer: the shortest over microbatches and directions, from the later of both sides being
    ready to its end, because a longer one was also waited with.
    """
    stages = range(timeline.schedule.stages)
    took: dict[tuple[Kind, int], list[float]] = {}
    for _, step, start_us, end_us in timeline.compute:
        actions = flatten(step)
        for action in actions:
            share = (end_us - start_us) / len(actions)
            took.setdefault((action.kind, action.stage), []).append(share)

    def typical(kind: Kind, stage: int) -> float:
        return median(took.get((kind, stage), [0.0]))

    return Costs(
        forward=[typical(Kind.F, s) for s in stages],
        input_grad=[typical(Kind.I, s) or typical(Kind.B, s) for s in stages],
        weight_grad=[typical(Kind.W, s) for s in stages],
        transfer=_transfers(timeline),
    )


def predict(timeline: Timeline) -> Timeline:
    """What the simulator makes of the schedule with the costs of a measured window."""
    return simulate(timeline.schedule, measured_costs(timeline))


def report(predicted: Timeline, measured: Timeline) -> Table:
    """A row a rank: its stages, bubble and peak activations, predicted and measured."""
    table = Table()
    for name in ("rank", "stages", "bubble predicted", "measured", "peak predicted", "measured"):
        table.add_column(name, justify="right")
    schedule = measured.schedule
    for rank in range(schedule.ranks):
        table.add_row(
            str(rank),
            " ".join(map(str, schedule.stages_of(rank))),
            f"{_bubble(predicted, rank):.1%}",
            f"{_bubble(measured, rank):.1%}",
            str(predicted.peak_activations[rank]),
            str(measured.peak_activations[rank]),
        )
    table.add_section()
    table.add_row(
        "all",
        str(schedule.stages),
        f"{predicted.bubble_ratio:.1%}",
        f"{measured.bubble_ratio:.1%}",
        str(max(predicted.peak_activations)),
        str(max(measured.peak_activations)),
    )
    return table


def _bubble(timeline: Timeline, rank: int) -> float:
    """The share of the window in which this rank does not compute."""
    return 1 - timeline.busy_us[rank] / timeline.makespan


def _transfers(timeline: Timeline) -> list[float]:
    spans = {a: span for span in timeline.transfers for a in flatten(span.action)}
    took: dict[int, list[float]] = {}
    for send, span in spans.items():
        if send.kind.is_send:
            receive = spans[peer_of(send)]
            boundary = min(send.stage, peer_of(send).stage)
            ready_us = max(span.start_us, receive.start_us)
            took.setdefault(boundary, []).append(max(receive.end_us - ready_us, 0.0))
    return [min(took.get(boundary, [0.0])) for boundary in range(timeline.schedule.stages - 1)]
