"""The order of microbatches of different lengths, and the schedule, as one model for CP-SAT.

As in `cpsat.py`, but who is first of two microbatches is open, once for all chains.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from npu_pipe.planner.cpsat import WORKERS, Solved
from npu_pipe.planner.grid import make_grid
from npu_pipe.planner.play import play
from npu_pipe.planner.problem import Orders, Problem, fits, with_turns

__all__ = ["solve_turns"]


def solve_turns(
    problem: Problem,
    orders: Orders,
    *,
    time_limit_s: float,
    seed: int,
) -> tuple[Problem, Solved]:
    """A better order of microbatches and schedule for it, if there is; the bound is over all
    orders of the microbatches that are the same on all stages.

    For the makespan only: where times count from depends on who is first.
    """
    from ortools.sat.python import cp_model

    played = play(problem, orders)
    assert played is not None, "a solver starts from orders that can run"
    grid, m = make_grid(problem, played.value), problem.microbatches
    top = grid.floor(max(played.end)) + len(problem)
    model = cp_model.CpModel()
    # Tasks keep the numbers of `problem`: here a turn is only the name of a microbatch.
    start = [model.new_int_var(0, top, f"start {task}") for task in range(len(problem))]
    length = [grid.floor(time) for time in problem.duration]
    latest = model.new_int_var(0, top, "latest")
    for task, at in enumerate(start):
        model.add_hint(at, grid.floor(played.start[task]))
        source, own = problem.source[task], problem.own_need(task)
        if source >= 0:
            travel = grid.floor(problem.delay[task])
            model.add(at >= start[source] + length[source] + travel)
        if own >= 0:
            model.add(at >= start[own] + length[own])
        model.add(latest >= at + length[task])
    for one, two in combinations(range(m), 2):
        is_first = model.new_bool_var(f"{one} before {two}")
        model.add_hint(is_first, True)
        for chain in range(0, len(problem), m):
            first, second = chain + one, chain + two
            model.add(start[second] >= start[first] + length[first]).only_enforce_if(is_first)
            model.add(start[first] >= start[second] + length[second]).only_enforce_if(~is_first)
    size = problem.stages * m
    for rank, order in enumerate(orders):
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start[task], length[task], f"at {task}")
            for task in order
        )
        forwards = [task for task in order if task < size]
        if problem.caps[rank] < len(forwards):
            held = []
            for task in forwards:
                release = task + (problem.kinds - 1) * size
                end = start[release] + length[release]
                took = model.new_int_var(0, top, f"held {task}")
                held.append(model.new_interval_var(start[task], took, end, f"hold {task}"))
            model.add_cumulative(held, [1] * len(held), problem.caps[rank])
    model.minimize(latest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    solver.parameters.num_workers = WORKERS
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    bound = solver.best_objective_bound / grid.scale
    same = Solved(orders, played.value, bound, grid.slack(problem), status == cp_model.OPTIMAL)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return problem, same
    at = [solver.value(variable) for variable in start]
    by_turn = sorted(range(m), key=lambda turn: (at[turn], at[turn + size], turn))
    rename = {old: new for new, old in enumerate(by_turn)}
    other = with_turns(problem, tuple(problem.turns[turn] for turn in by_turn))
    found = [
        [
            task // m * m + rename[task % m]
            for task in sorted(order, key=lambda task: (at[task], at[task] + length[task]))
        ]
        for order in orders
    ]
    if not all(fits(other, order, rank) for rank, order in enumerate(found)):
        return problem, same
    again = play(other, found)
    if again is None or again.value > played.value:
        return problem, same
    return other, replace(same, orders=found, value=again.value)
