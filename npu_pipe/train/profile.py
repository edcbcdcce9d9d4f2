"""What the stages of a measured window took, as a workload to plan with. Imports no torch.

The layers of that workload are the stages of the run: it can be planned for as many stages or
fewer, but not cut finer than it was measured.
"""

from __future__ import annotations

from statistics import median

from npu_pipe.ir.action import Action, Kind
from npu_pipe.planner.workload import Workload
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.train.report import measured_costs

__all__ = ["profile"]


def profile(timeline: Timeline) -> Workload:
    """Medians over the microbatches, in microseconds; transfers as in `measured_costs`.

    A stage whose backwards were split has its own halves. For one that ran whole backwards only
    they are taken as equal, and the workload says so.
    """
    costs = measured_costs(timeline)
    halves: dict[tuple[Kind, int], list[float]] = {}
    for span in timeline.compute:
        if isinstance(span.action, Action) and span.action.kind in (Kind.I, Kind.W):
            key = span.action.kind, span.action.stage
            halves.setdefault(key, []).append(span.end_us - span.start_us)
    input_grad, weight_grad = [], []
    is_split = True
    for stage, whole in enumerate(costs.input_grad):
        first, second = halves.get((Kind.I, stage)), halves.get((Kind.W, stage))
        if first and second:
            input_grad.append(median(first))
            weight_grad.append(median(second))
        else:
            is_split = False
            input_grad.append(whole / 2)
            weight_grad.append(whole / 2)
    return Workload(
        forward=costs.forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        transfer=costs.transfer,
        has_halves=is_split,
    )
