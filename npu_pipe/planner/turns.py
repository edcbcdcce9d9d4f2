"""In which order to take microbatches of different lengths.

Sorted by length is the worst: long ones then wait for long ones at one end, and leave bubbles
at the other. Swaps and shifts of a few orders, each judged by list schedules, do much better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from npu_pipe.planner.clock import Clock
from npu_pipe.planner.heuristic import Rule, list_schedule, rules
from npu_pipe.planner.play import play
from npu_pipe.planner.problem import Orders, Problem, with_turns

__all__ = ["better_turns", "good_turns"]

_RULES = 3
_TASKS = 10_000  # placed by list schedules, per second allowed


def good_turns(
    problem: Problem, *, number: int, budget_s: float, rng: Random, clock: Clock
) -> list[Problem]:
    """The problem with its microbatches in some good orders, from a few descents; best first.

    budget_s: only sets how many orders are tried, so that a seed gives one answer; the clock
    cuts it off all the same.
    """
    judged = sorted(rules(problem), key=lambda rule: _value(problem, [rule]))
    chosen = judged[:_RULES]
    tries = max(20, int(budget_s * _TASKS / len(problem)))
    found: dict[tuple[int, ...], tuple[float, Problem]] = {}
    for descent in range(number):
        best = problem
        if descent:
            best = with_turns(problem, tuple(rng.sample(problem.turns, len(problem.turns))))
        best, value = _descend(best, lambda p: _value(p, chosen), tries // number, rng, clock)
        found[best.turns] = value, best
    return [best for _, best in sorted(found.values(), key=lambda pair: pair[0])]


def better_turns(
    problem: Problem, orders: Orders, *, tries: int, rng: Random, clock: Clock
) -> Problem:
    """The same orders of tasks, filled with the microbatches in an order at least as good.

    To judge one takes no list schedule, so many can be.
    """
    return _descend(problem, lambda p: _played(p, orders), tries, rng, clock)[0]


def _descend(
    problem: Problem,
    judge: Callable[[Problem], float],
    tries: int,
    rng: Random,
    clock: Clock,
) -> tuple[Problem, float]:
    value = judge(problem)
    for _ in range(tries):
        if clock.is_over:
            break
        other = with_turns(problem, _neighbour(problem.turns, rng))
        other_value = judge(other)
        if other_value <= value:
            problem, value = other, other_value
    return problem, value


def _neighbour(turns: Sequence[int], rng: Random) -> tuple[int, ...]:
    other = list(turns)
    one, two = rng.sample(range(len(other)), 2)
    if rng.random() < 0.5:
        other[one], other[two] = other[two], other[one]
    else:
        other.insert(two, other.pop(one))
    return tuple(other)


def _value(problem: Problem, chosen: Sequence[Rule]) -> float:
    return min(_played(problem, list_schedule(problem, rule)) for rule in chosen)


def _played(problem: Problem, orders: Orders) -> float:
    played = play(problem, orders)
    assert played is not None, "whether orders can run does not depend on times"
    return played.value
