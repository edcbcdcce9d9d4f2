"""Search with OR-Tools: the whole problem if it is small, windows of it if it is large."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from npu_pipe.planner.best import Best
from npu_pipe.planner.clock import Clock
from npu_pipe.planner.request import Request

__all__ = ["search_by_solver"]

_WINDOWS_FROM = 400  # tasks from which windows come first
_WHOLE_TO = 1200  # tasks up to which the whole problem is solved
_TURNS_TO = 400  # ... with the order of the microbatches open


def search_by_solver(request: Request, best: Best, *, rng: Random, clock: Clock) -> Best:
    """Better orders and a better bound, if there are. Needs OR-Tools."""
    # Imported late: OR-Tools takes its time to load, and may not be installed.
    from npu_pipe.planner.cpsat import solve
    from npu_pipe.planner.cpsat_turns import solve_turns
    from npu_pipe.planner.windows import improve_by_windows

    size, seed = len(best.problem), rng.randrange(1 << 30)
    if request.is_uneven and request.is_exact and size <= _TURNS_TO:
        return solve_turns(best, seed=seed, clock=clock)
    if size > _WINDOWS_FROM:
        part = clock.part(0.4 if size <= _WHOLE_TO else 1.0)
        best = improve_by_windows(best, rng=rng, clock=part)
        if best.is_met or size > _WHOLE_TO:
            return best
    solved = solve(best.problem, best.orders, time_limit_s=clock.left_s, seed=seed)
    best = replace(best, orders=solved.orders, value=solved.value)
    is_bound = request.is_exact and not request.is_uneven
    if is_bound and solved.bound > best.bound:
        best = replace(best, bound=solved.bound, slack=solved.slack)
    return best
