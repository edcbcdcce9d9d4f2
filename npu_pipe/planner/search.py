"""Search for a schedule that suits the costs, and say how far from the best it can be.

    list schedules and published ones -> tabu search -> CP-SAT, if it is installed

Each is better than the one before and is skipped once a bound is met. Without OR-Tools the bound
is that of `bound.py`; with it, the solver's own.
"""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from npu_pipe.api import simulate
from npu_pipe.ir.check import check_schedule
from npu_pipe.ir.schedule import Schedule
from npu_pipe.planner.bound import bound, load_bound
from npu_pipe.planner.clock import Clock
from npu_pipe.planner.heuristic import list_schedule, random_rule
from npu_pipe.planner.local_search import improve
from npu_pipe.planner.play import play
from npu_pipe.planner.problem import Orders, Problem, make_problem, to_schedule
from npu_pipe.planner.request import check_costs, check_number, make_caps, make_placement
from npu_pipe.planner.starts import good_starts
from npu_pipe.planner.turns import better_turns, good_turns
from npu_pipe.simulator.costs import Costs

__all__ = ["Found", "Objective", "search"]

_TOUCH = 1e-9  # relative: what floating point makes of equal times
_MOVES = 2000  # of one round of tabu search
_CYCLES = 8  # in a round, where the order of the microbatches is open
_ROUNDS, _ROUNDS_BEFORE_SOLVER = 16, 2
_WHOLE = 1200  # tasks up to which CP-SAT is given the whole problem
_WHOLE_TURNS = 400  # ... with the order of the microbatches open


class Objective(enum.StrEnum):
    """What is made small; see `Timeline.makespan` and `Timeline.span`."""

    MAKESPAN = "makespan"
    SPAN = "span"


@dataclass(frozen=True, slots=True)
class Found:
    """The best schedule found.

    makespan, span: simulated with the costs given.
    lower_bound: of the objective, over all schedules of these sizes, placement and caps that
        take the microbatches in one order on all stages. When they cost the same that is no
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
    check_number("ranks", ranks, least=1, is_whole=True)
    check_number("microbatches", microbatches, least=1, is_whole=True)
    check_number("time_limit_s", time_limit_s, least=0, is_whole=False)
    check_costs(costs, microbatches)
    homes = make_placement(costs, ranks, placement)
    asked = _Asked(
        costs=costs,
        placement=homes,
        caps=make_caps(max_activations, homes, ranks=ranks, microbatches=microbatches),
        microbatches=microbatches,
        is_split=split_backward,
        objective=Objective(objective),
    )
    best = _search(asked, clock, Random(seed), is_solvable=_has_solver())
    schedule = to_schedule(best.problem, best.orders, "searched")
    check_schedule(schedule)
    timeline = simulate(schedule, costs)
    value = timeline.span if asked.objective is Objective.SPAN else timeline.makespan
    lower = min(best.bound, value)
    return Found(
        schedule=schedule,
        objective=asked.objective,
        makespan=timeline.makespan,
        span=timeline.span,
        lower_bound=lower,
        gap=(value - lower) / value if value else 0.0,
        proved=value <= lower * (1 + _TOUCH) + best.slack,
        seconds=clock.spent_s,
        permutation=best.problem.turns,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    costs: Costs
    placement: tuple[int, ...]
    caps: tuple[int, ...]
    microbatches: int
    is_split: bool
    objective: Objective

    def problem(self) -> Problem:
        return make_problem(
            self.costs,
            placement=self.placement,
            caps=self.caps,
            turns=tuple(range(self.microbatches)),
            is_split=self.is_split,
            is_span=self.objective is Objective.SPAN,
        )

    @property
    def is_uneven(self) -> bool:
        """Whether microbatches differ in length."""
        return len(set(self.costs.microbatch_scale)) > 1

    @property
    def is_exact(self) -> bool:
        """Whether a solver's bound for the problem holds for the objective: transfers are
        delays, and if times count from a rank's first start, nothing can put that off."""
        if self.objective is Objective.SPAN:
            ranks = len(self.caps)
            if self.is_uneven or set(self.placement[:ranks]) != set(range(ranks)):
                return False
        return self.costs.overlapped


@dataclass(frozen=True, slots=True)
class _Best:
    """slack: by how much rounding may have set the bound too low."""

    problem: Problem
    orders: Orders
    value: float
    bound: float
    slack: float = 0.0

    @property
    def is_met(self) -> bool:
        return self.value <= self.bound * (1 + _TOUCH) + self.slack


def _search(asked: _Asked, clock: Clock, rng: Random, *, is_solvable: bool) -> _Best:
    problem = asked.problem()
    beside = replace(asked, costs=replace(asked.costs, overlapped=True))
    lower = max(bound(beside.problem()), load_bound(problem))
    rounds = _ROUNDS_BEFORE_SOLVER if is_solvable and len(problem) <= _WHOLE else _ROUNDS
    best = _by_hand(asked, lower, clock.part(0.4) if is_solvable else clock, rng, rounds)
    if not is_solvable or best.is_met or clock.is_over:
        return best
    # Imported late: OR-Tools takes its time to load.
    from npu_pipe.planner.cpsat import solve
    from npu_pipe.planner.cpsat_turns import solve_turns
    from npu_pipe.planner.windows import improve_by_windows

    problem, orders = best.problem, best.orders
    seed = rng.randrange(1 << 30)
    is_open = asked.is_uneven and asked.is_exact and len(problem) <= _WHOLE_TURNS
    if is_open:
        problem, solved = solve_turns(problem, orders, time_limit_s=clock.left_s, seed=seed)
    else:
        if len(problem) > _WHOLE // 3:
            part = clock.part(0.4 if len(problem) <= _WHOLE else 1)
            goal = lower * (1 + _TOUCH)
            value, orders = improve_by_windows(problem, orders, rng=rng, goal=goal, clock=part)
            best = replace(best, orders=orders, value=value)
        if len(problem) > _WHOLE or best.is_met:
            return best
        solved = solve(problem, orders, time_limit_s=clock.left_s, seed=seed)
    best = replace(best, problem=problem, orders=solved.orders, value=solved.value)
    is_bound = asked.is_exact and (is_open or not asked.is_uneven)
    if is_bound and solved.bound > lower:
        best = replace(best, bound=solved.bound, slack=solved.slack)
    return best


def _by_hand(asked: _Asked, lower: float, clock: Clock, rng: Random, rounds: int) -> _Best:
    """List schedules, then tabu search from the best of them."""
    problems = [asked.problem()]
    if asked.is_uneven:
        problems = good_turns(
            problems[0], number=4, budget_s=clock.limit_s, rng=rng, clock=clock.part(0.2)
        )
    starts = []
    for problem in problems:
        for value, orders in good_starts(problem, number=3, clock=clock.part(0.2)):
            starts.append(_Best(problem, orders, value, lower))
    starts.sort(key=lambda start: start.value)
    best = starts[0]
    for index in range(rounds):
        if best.is_met or clock.is_over:
            break
        start = starts[index] if index < min(len(starts), 4) else _random_start(best, rng)
        improved = (_round_of_turns if asked.is_uneven else _round)(start, rng, clock)
        if improved.value < best.value:
            best = improved
    return best


def _round(start: _Best, rng: Random, clock: Clock, moves: int = _MOVES) -> _Best:
    value, orders = improve(
        start.problem,
        start.orders,
        rng=rng,
        moves=moves,
        goal=start.bound * (1 + _TOUCH),
        clock=clock,
    )
    return replace(start, orders=orders, value=value)


def _round_of_turns(start: _Best, rng: Random, clock: Clock) -> _Best:
    """Tabu search for the order of the microbatches, the order for what it found, and so on."""
    for _ in range(_CYCLES):
        start = _round(start, rng, clock, _MOVES // _CYCLES)
        problem = better_turns(
            start.problem, start.orders, tries=_MOVES // _CYCLES, rng=rng, clock=clock
        )
        start = replace(start, problem=problem)
    return _round(start, rng, clock, _MOVES // _CYCLES)


def _random_start(best: _Best, rng: Random) -> _Best:
    orders = list_schedule(best.problem, random_rule(best.problem, rng))
    played = play(best.problem, orders)
    assert played is not None, "a list schedule can run"
    return replace(best, orders=orders, value=played.value)


def _has_solver() -> bool:
    return importlib.util.find_spec("ortools") is not None
