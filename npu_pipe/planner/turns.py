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
from npu_pipe.planner.problem import Problem

__all__ = ["good_turns"]

_RULES = 3
_TASKS = 30_000  # placed by list schedules, per second allowed

Make = Callable[[tuple[int, ...]], Problem]


def good_turns(
    make: Make,
    microbatches: int,
    *,
    number: int,
    budget_s: float,
    rng: Random,
    clock: Clock,
) -> list[tuple[int, ...]]:
    """The best orders of the microbatches from a few descents, best first.

    make: the problem with its microbatches in some order. budget_s: only sets how many orders
    are tried, so that a seed gives one answer; the clock cuts it off all the same.
    """
    identity = tuple(range(microbatches))
    problem = make(identity)
    judged = sorted(rules(problem), key=lambda rule: _value(problem, [rule]))
    chosen = judged[:_RULES]
    tries = max(20, int(budget_s * _TASKS / len(problem)))
    found: dict[tuple[int, ...], float] = {}
    for descent in range(number):
        turns = list(identity)
        if descent:
            rng.shuffle(turns)
        value = _value(make(tuple(turns)), chosen)
        for _ in range(tries // number):
            if clock.is_over:
                break
            other = _neighbour(turns, rng)
            other_value = _value(make(tuple(other)), chosen)
            if other_value <= value:
                turns, value = other, other_value
        found[tuple(turns)] = value
    return sorted(found, key=lambda turns: found[turns])


def _neighbour(turns: Sequence[int], rng: Random) -> list[int]:
    other = list(turns)
    one, two = rng.sample(range(len(other)), 2)
    if rng.random() < 0.5:
        other[one], other[two] = other[two], other[one]
    else:
        other.insert(two, other.pop(one))
    return other


def _value(problem: Problem, chosen: Sequence[Rule]) -> float:
    values = []
    for rule in chosen:
        played = play(problem, list_schedule(problem, rule))
        assert played is not None, "a list schedule can run"
        values.append(played.value)
    return min(values)
