"""Search for a schedule that suits the costs, and say how far from the best it can be.

    published and list schedules -> tabu search -> CP-SAT, if it is installed

Each is better than the one before and is skipped once a bound is met. Without OR-Tools the bound
is that of `bound.py`; with it, the solver's own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from npu_pipe.api import simulate
from npu_pipe.ir.check import check_schedule
from npu_pipe.ir.schedule import Schedule
from npu_pipe.planner.by_hand import search_by_hand
from npu_pipe.planner.by_solver import search_by_solver
from npu_pipe.planner.clock import Clock
from npu_pipe.planner.problem import to_schedule
from npu_pipe.planner.request import (
    Objective,
    Request,
    check_objective,
    check_time_limit,
    make_caps,
    make_placement,
)
from npu_pipe.schedules.sizes import check_sizes
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.numbers import require_factors

__all__ = ["Found", "Objective", "search"]


@dataclass(frozen=True, slots=True)
class Found:
    """The best schedule found.

    makespan, span: simulated with the costs given.
    lower_bound: of the objective, over all schedules of these sizes, placement and caps that
        take the microbatches in one order on all stages, without fused pairs.
    is_uneven: whether microbatches differ in length. Where they do not, one order is no
        restriction.
    gap: (objective - lower_bound) / objective.
    proved: the gap is 0, but for what rounding the costs to the solver's grid can hide.
    permutation: the order in which the microbatches are taken; as numbered, if they cost
        the same.
    """

    schedule: Schedule
    objective: Objective
    makespan: float
    span: float
    lower_bound: float
    is_uneven: bool
    gap: float
    proved: bool
    seconds: float
    permutation: tuple[int, ...]


def search(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    max_activations: int | Sequence[int] | None = None,
    split_backward: bool = True,
    time_limit_s: float = 10,
    objective: Objective = Objective.MAKESPAN,
    placement: Sequence[int] | None = None,
    seed: int = 0,
) -> Found:
    """The best schedule found in `time_limit_s` seconds; sooner where it is proved to be best.

    max_activations: the most stage activations a rank may hold, one number for all or one a
        rank; None for no limit.
    split_backward: backwards as I and W; False for whole ones.
    placement: stage -> rank; None for one stage a rank.
    seed: one seed gives one answer, as long as the time does not run out.
    Raises ScheduleError for sizes or caps that no schedule can have, and CostsError.
    """
    clock = Clock.start(time_limit_s)
    check_sizes(ranks, microbatches)
    check_time_limit(time_limit_s)
    check_objective(objective)
    require_factors(costs.microbatch_scale, microbatches)
    homes = make_placement(costs, ranks, placement)
    request = Request(
        costs=costs,
        placement=homes,
        caps=make_caps(max_activations, homes, ranks=ranks, microbatches=microbatches),
        microbatches=microbatches,
        is_split=split_backward,
        objective=Objective(objective),
    )
    rng = Random(seed)
    if costs.overlapped and _has_solver():
        best = search_by_hand(
            request, rng=rng, clock=clock.part(0.6 if request.is_uneven else 0.4), is_last=False
        )
        if not best.is_met and not clock.is_over:
            best = search_by_solver(request, best, rng=rng, clock=clock)
    else:
        best = search_by_hand(request, rng=rng, clock=clock, is_last=True)
    schedule = to_schedule(best.problem, best.orders, "searched")
    check_schedule(schedule)
    timeline = simulate(schedule, costs)
    value = timeline.span if request.objective is Objective.SPAN else timeline.makespan
    lower = min(best.bound, value)
    return Found(
        schedule=schedule,
        objective=request.objective,
        makespan=timeline.makespan,
        span=timeline.span,
        lower_bound=lower,
        is_uneven=request.is_uneven,
        gap=(value - lower) / value if value else 0.0,
        proved=best.is_met,
        seconds=clock.spent_s,
        permutation=best.problem.turns,
    )


def _has_solver() -> bool:
    return importlib.util.find_spec("ortools") is not None
