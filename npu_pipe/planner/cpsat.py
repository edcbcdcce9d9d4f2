"""The problem, or a window of one, as a model for OR-Tools' CP-SAT.

A task is an interval of fixed length; those of a rank do not overlap; those of a chain come in
turn; what a task needs ends, and travels, before it starts. A cap of L on a rank with one chunk
says that F number k starts after release k - L; with more chunks, that what F's take and
releases give back piles up to L at most.

Times are rounded down to steps of a grid, so that the solver's bound holds for the true times
too. What a schedule takes is always played with the true times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from npu_pipe.planner.grid import make_grid
from npu_pipe.planner.play import play, tails
from npu_pipe.planner.problem import Orders, Problem, fits

__all__ = ["WORKERS", "Solved", "solve", "solve_window"]

WORKERS = 2


@dataclass(frozen=True, slots=True)
class Solved:
    """What a solver found.

    orders, value: the orders given, or better ones. bound: none beats it, in this order of the
    microbatches; -inf where nothing was proved. slack: how much rounding may have taken off it.
    is_done: nothing better exists, on the grid.
    """

    orders: Orders
    value: float
    bound: float
    slack: float
    is_done: bool


def solve(problem: Problem, orders: Orders, *, time_limit_s: float, seed: int) -> Solved:
    """Better orders than those given, if there are, and a bound."""
    return _solve(problem, orders, range(len(problem)), time_limit_s, seed)


def solve_window(
    problem: Problem, orders: Orders, tasks: Iterable[int], *, time_limit_s: float, seed: int
) -> Solved:
    """Likewise with only some tasks free to move; its bound says nothing about the whole.

    tasks: such that none outside lies, by any need, between two inside; all that start within
    a span of time, for one. Of equal orders it prefers those that let the ranks end early.
    """
    return _solve(problem, orders, tasks, time_limit_s, seed)


def _solve(
    problem: Problem, orders: Orders, tasks: Iterable[int], time_limit_s: float, seed: int
) -> Solved:
    from ortools.sat.python import cp_model

    built = _Model(cp_model, problem, orders, tasks)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    solver.parameters.num_workers = WORKERS
    solver.parameters.random_seed = seed
    status = solver.solve(built.model)
    value, found = built.value, orders
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        other = built.reorder({task: solver.value(at) for task, at in built.start.items()})
        played = None
        if all(fits(problem, order, rank) for rank, order in enumerate(other)):
            played = play(problem, other)
        if played is not None and played.value <= value:
            value, found = played.value, other
    bound = -math.inf
    if built.is_whole and status != cp_model.INFEASIBLE:
        bound = solver.best_objective_bound / built.grid.scale
    return Solved(found, value, bound, built.grid.slack(problem), status == cp_model.OPTIMAL)


class _Model:
    """start: per task of the window, its variable. late: per rank, when its window, and the
    longest way that follows in the orders, ends."""

    def __init__(self, cp: Any, problem: Problem, orders: Orders, tasks: Iterable[int]) -> None:
        played = play(problem, orders)
        assert played is not None, "a solver starts from orders that can run"
        self.problem, self.orders, self.end = problem, orders, played.end
        self.value = played.value
        self.tail = tails(problem, played)
        # With a smaller span a rank that starts late may end later than all do now.
        horizon = max(*played.end, played.value + max(problem.offset))
        self.grid = make_grid(problem, horizon)
        self.top = top = self.grid.floor(horizon) + len(problem)
        self.model = cp.CpModel()
        self.start = {task: self.model.new_int_var(0, top, f"start {task}") for task in tasks}
        self.is_whole = len(self.start) == len(problem)
        self.length = {task: self.grid.floor(problem.duration[task]) for task in self.start}
        for task, start in self.start.items():
            self.model.add_hint(start, self.grid.floor(played.start[task]))
            self.needs(task)
        latest = self.model.new_int_var(-top, top, "latest")
        lates = []
        for rank, order in enumerate(orders):
            inside = [task for task in order if task in self.start]
            if inside:
                late = self.model.new_int_var(-top, top, f"late {rank}")
                self.model.add(latest >= late)
                self.rank(rank, inside, late)
                self.cap(rank, inside)
                lates.append(late)
        self.model.minimize(latest if self.is_whole else latest * (4 * problem.ranks) + sum(lates))
        self.outside(latest)

    def ended(self, task: int) -> Any:
        return self.start[task] + self.length[task]

    def needs(self, task: int) -> None:
        problem, start, floor = self.problem, self.start[task], self.grid.floor
        source, own = problem.source[task], problem.own_need(task)
        if source in self.start:
            self.model.add(start >= self.ended(source) + floor(problem.delay[task]))
        elif source >= 0:
            self.model.add(start >= floor(self.end[source] + problem.delay[task]))
        if own in self.start:
            self.model.add(start >= self.ended(own))

    def outside(self, latest: Any) -> None:
        """What other ranks do after the window with what it gives."""
        problem = self.problem
        for task in self.start:
            user = problem.user[task]
            if user >= 0 and user not in self.start:
                way = problem.delay[user] + problem.duration[user] + self.tail[user]
                self.model.add(latest >= self.ended(task) + self.grid.floor(way))

    def rank(self, rank: int, inside: list[int], late: Any) -> None:
        """One at a time, the chains in turn, between what stands before and after."""
        problem, model, order = self.problem, self.model, self.orders[rank]
        first, after = order.index(inside[0]), order.index(inside[-1]) + 1
        begin = self.grid.floor(self.end[order[first - 1]]) if first else 0
        way = -problem.offset[rank]
        if after < len(order):
            way = self.tail[order[after]] + problem.duration[order[after]]
        before: dict[int, int] = {}  # chain -> its last task so far
        for task in inside:
            chain = task // problem.microbatches
            model.add(self.start[task] >= (self.ended(before[chain]) if chain in before else begin))
            before[chain] = task
        for task in before.values():
            model.add(late >= self.ended(task) + self.grid.floor(way))
        model.add_no_overlap(
            model.new_fixed_size_interval_var(self.start[task], self.length[task], f"at {task}")
            for task in inside
        )

    def cap(self, rank: int, inside: list[int]) -> None:
        problem, model, cap = self.problem, self.model, self.problem.caps[rank]
        size = problem.stages * problem.microbatches
        to_release = (problem.kinds - 1) * size
        forwards = [task for task in inside if task < size]
        if problem.placement.count(rank) == 1:
            for task in forwards:
                release = task + to_release - cap
                if task % problem.microbatches >= cap and release in self.start:
                    model.add(self.start[task] >= self.ended(release))
            return
        releases = [task for task in inside if task >= to_release]
        before = self.orders[rank][: self.orders[rank].index(inside[0])]
        held = sum(task < size for task in before) - sum(task >= to_release for task in before)
        if held + len(forwards) > cap:
            model.add_reservoir_constraint(
                [*(self.start[task] for task in forwards), *map(self.ended, releases)],
                [1] * len(forwards) + [-1] * len(releases),
                -len(releases),
                cap - held,
            )

    def reorder(self, start: dict[int, int]) -> Orders:
        """The orders with the window's tasks by their starts."""
        found = []
        for order in self.orders:
            inside = [task for task in order if task in start]
            if inside:
                first = order.index(inside[0])
                inside.sort(key=lambda task: (start[task], start[task] + self.length[task]))
                order = [*order[:first], *inside, *order[first + len(inside) :]]
            found.append(list(order))
        return found
