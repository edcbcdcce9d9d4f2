"""Search without a solver: good starts, then rounds of tabu search; at last, where transfers
occupy the ranks and the search has only a model of that, small changes that are tried out."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from npu_pipe.api import simulate
from npu_pipe.planner.best import Best
from npu_pipe.planner.bound import bound, load_bound
from npu_pipe.planner.clock import Clock
from npu_pipe.planner.heuristic import list_schedule, random_rule
from npu_pipe.planner.local_search import improve
from npu_pipe.planner.play import play
from npu_pipe.planner.problem import fits, to_schedule
from npu_pipe.planner.request import Objective, Request
from npu_pipe.planner.starts import good_starts
from npu_pipe.planner.turns import better_turns, first_turns, kick_turns

__all__ = ["search_by_hand"]

_STARTS = 3
_ROUNDS, _PATIENCE, _MOVES = 24, 5, 2000
_CYCLES, _CYCLE_MOVES = 8, 100  # of a round where the order of the microbatches is open
_SHIFTS, _FARTHEST = 500, 3  # tries in a row without gain; places that a task is shifted by
_SMALL = 1200  # tasks up to which a solver makes rounds needless


def search_by_hand(request: Request, *, rng: Random, clock: Clock, is_last: bool) -> Best:
    """Published and list schedules, then tabu search from the best of them, from random ones,
    and, where microbatches differ, from others of their orders.

    is_last: no solver follows.
    """
    first = request.problem()
    beside = replace(request, costs=replace(request.costs, overlapped=True))
    lower = max(bound(beside.problem()), load_bound(first))
    starts = [
        _judged(request, Best(problem, orders, value, lower))
        for problem in (first_turns(first) if request.is_uneven else [first])
        for value, orders in good_starts(problem, number=_STARTS, clock=clock.part(0.2))
    ]
    starts.sort(key=lambda start: start.value)
    best = starts[0]
    is_short = not is_last and not request.is_uneven and len(first) <= _SMALL
    since_best = 0
    for number in range(2 if is_short else _ROUNDS):
        if best.is_met or clock.is_over or since_best == _PATIENCE:
            break
        since_best += 1
        if number < min(len(starts), _STARTS):
            start = starts[number]
        elif request.is_uneven:
            start = replace(best, problem=kick_turns(best.problem, 3, rng))
        else:
            orders = list_schedule(first, random_rule(first, rng))
            start = replace(best, problem=first, orders=orders)
        if request.is_uneven:
            start = _round_of_turns(start, rng, clock)
        else:
            start = _round(start, _MOVES, rng, clock)
        start = _judged(request, start)
        if start.value < best.value:
            best, since_best = start, 0
    return best if request.costs.overlapped else _descend(request, best, rng, clock)


def _round(start: Best, moves: int, rng: Random, clock: Clock) -> Best:
    value, orders = improve(
        start.problem, start.orders, rng=rng, moves=moves, goal=start.goal, clock=clock
    )
    return replace(start, orders=orders, value=value)


def _round_of_turns(start: Best, rng: Random, clock: Clock) -> Best:
    """Tabu search for the microbatches' order, an order for what it found, and so on."""
    for _ in range(_CYCLES):
        start = _round(start, _CYCLE_MOVES, rng, clock)
        problem = better_turns(
            start.problem, start.orders, tries=_CYCLE_MOVES, rng=rng, clock=clock
        )
        start = replace(start, problem=problem)
    return _round(start, _CYCLE_MOVES, rng, clock)


def _descend(request: Request, best: Best, rng: Random, clock: Clock) -> Best:
    """Single tasks are shifted a little, and that is judged as it runs, not by the model."""
    since_best = 0
    while since_best < _SHIFTS and not (best.is_met or clock.is_over):
        since_best += 1
        rank = rng.randrange(best.problem.ranks)
        before, order = best.orders[rank], list(best.orders[rank])
        at = rng.randrange(len(order))
        order.insert(max(at + rng.randint(-_FARTHEST, _FARTHEST), 0), order.pop(at))
        orders = [*best.orders[:rank], order, *best.orders[rank + 1 :]]
        if order == before or not fits(best.problem, order, rank):
            continue
        if play(best.problem, orders) is None:
            continue
        other = _judged(request, replace(best, orders=orders))
        if other.value <= best.value:
            since_best = 0 if other.value < best.value else since_best
            best = other
    return best


def _judged(request: Request, found: Best) -> Best:
    """With the true value where the problem is only a model of the costs: blocking transfers."""
    if request.costs.overlapped:
        return found
    timeline = simulate(to_schedule(found.problem, found.orders, "judged"), request.costs)
    is_span = request.objective is Objective.SPAN
    return replace(found, value=timeline.span if is_span else timeline.makespan)
