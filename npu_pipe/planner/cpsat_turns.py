"""The order of microbatches of different lengths, and the schedule, as one model for CP-SAT.

As in `cpsat.py`, but who is first of two microbatches is open, once for all chains. The solver
is bad at raising a bound from below and good at showing that there is nothing below a ceiling,
so it is asked that first: half-way between bound and value, again and again.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

from npu_pipe.planner.best import Best
from npu_pipe.planner.clock import Clock
from npu_pipe.planner.cpsat import WORKERS
from npu_pipe.planner.grid import Grid, make_grid
from npu_pipe.planner.play import play
from npu_pipe.planner.problem import Problem, fits, with_turns

__all__ = ["solve_turns"]

_CLOSE = 1e-3  # relative distance of bound and value from which the last step is taken at once
_SHARE = 0.3  # of the time left, for one question


def solve_turns(best: Best, *, seed: int, clock: Clock) -> Best:
    """A better order of microbatches and schedule for it, if there is, and a better bound: over
    all orders of the microbatches that are the same on all stages.

    For the makespan only: where times count from for the span depends on who is first.
    """
    while not best.is_met and best.value - best.bound > _CLOSE * best.value:
        ceiling = (best.value + best.bound) / 2
        asked = _ask(best, ceiling, seed=seed, time_limit_s=clock.left_s * _SHARE, is_least=False)
        if asked is best or clock.is_over:
            break
        best = asked
    if best.is_met or clock.is_over:
        return best
    return _ask(best, best.value, seed=seed, time_limit_s=clock.left_s, is_least=True)


def _ask(best: Best, ceiling: float, *, seed: int, time_limit_s: float, is_least: bool) -> Best:
    """What is best after the question what is, at most, at a ceiling; the same object where
    that was not answered.

    is_least: the least is asked for, not just anything.
    """
    from ortools.sat.python import cp_model

    grid = make_grid(best.problem, best.value)
    model, start, latest = _model(cp_model, best.problem, grid, grid.floor(ceiling))
    if is_least:
        model.minimize(latest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    solver.parameters.num_workers = WORKERS
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    slack = grid.slack(best.problem)
    if status == cp_model.INFEASIBLE and ceiling > best.bound:
        return replace(best, bound=ceiling, slack=slack)
    if is_least and status != cp_model.INFEASIBLE:
        least = solver.best_objective_bound / grid.scale
        if least > best.bound:
            best = replace(best, bound=least, slack=slack)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return _read(best, [solver.value(variable) for variable in start], grid)
    return best


def _model(cp: Any, problem: Problem, grid: Grid, top: int) -> tuple[Any, list[Any], Any]:
    """The model with everything over at `top`, the start of each task, and the end of all.

    Tasks keep the numbers of `problem`: here a turn is only the name of a microbatch.
    """
    m, size = problem.microbatches, problem.stages * problem.microbatches
    model = cp.CpModel()
    start = [model.new_int_var(0, top, f"start {task}") for task in range(len(problem))]
    latest = model.new_int_var(0, top, "latest")
    length = [grid.floor(time) for time in problem.duration]
    for task, at in enumerate(start):
        source, own = problem.source[task], problem.own_need(task)
        if source >= 0:
            travel = grid.floor(problem.delay[task])
            model.add(at >= start[source] + length[source] + travel)
        if own >= 0:
            model.add(at >= start[own] + length[own])
        model.add(at + length[task] <= latest)
    before: dict[tuple[int, int], Any] = {}  # (one, other): whether it comes first
    for one, two in combinations(range(m), 2):
        is_first = before[one, two] = model.new_bool_var(f"{one} before {two}")
        before[two, one] = ~is_first
        model.add_hint(is_first, True)
        for chain in range(0, len(problem), m):
            first, second = chain + one, chain + two
            model.add(start[second] >= start[first] + length[first]).only_enforce_if(is_first)
            model.add(start[first] >= start[second] + length[second]).only_enforce_if(~is_first)
    for rank, cap in enumerate(problem.caps):
        tasks = [task for task in range(len(problem)) if problem.rank[task] == rank]
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start[task], length[task], f"at {task}")
            for task in tasks
        )
        held = []
        for task in (task for task in tasks if task < size):
            release = task + (problem.kinds - 1) * size
            took = model.new_int_var(0, top, f"held {task}")
            end = start[release] + length[release]
            held.append(model.new_interval_var(start[task], took, end, f"hold {task}"))
        if cap < len(held):
            model.add_cumulative(held, [1] * len(held), cap)
    # What follows from the above; told, the solver proves in seconds what took it minutes.
    for one, two, three in permutations(range(m), 3):
        if one < min(two, three):
            model.add_bool_or(~before[one, two], ~before[two, three], before[one, three])
    for chain in range(0, len(problem), m):
        for one in range(m):
            others = (two for two in range(m) if two != one)
            load = sum(length[chain + two] * before[two, one] for two in others)
            model.add(start[chain + one] >= load)
    return model, start, latest


def _read(best: Best, start: list[int], grid: Grid) -> Best:
    """The solver's answer, if it is better with the true times."""
    problem = best.problem
    m, size = problem.microbatches, problem.stages * problem.microbatches
    turns = sorted(range(m), key=lambda turn: (start[turn], start[turn + size], turn))
    other = with_turns(problem, tuple(problem.turns[turn] for turn in turns))
    new = {turn: place for place, turn in enumerate(turns)}

    def by_start(task: int) -> tuple[int, int]:
        return start[task], start[task] + grid.floor(problem.duration[task])

    orders = [
        [
            task // m * m + new[task % m]
            for task in sorted(range(len(problem)), key=by_start)
            if problem.rank[task] == rank
        ]
        for rank in range(problem.ranks)
    ]
    if not all(fits(other, order, rank) for rank, order in enumerate(orders)):
        return best
    played = play(other, orders)
    if played is None or played.value >= best.value:
        return best
    return replace(best, problem=other, orders=orders, value=played.value)
