"""In which order to take microbatches of different lengths.

Sorted by length is the worst: the ranks that wait for the first, or drain the last, wait for
long ones. Rising to the middle and falling again, or the reverse, are better starts:

    lengths 1 2 3 4 5 6    rising 1 3 5 6 4 2    falling 6 4 2 1 3 5

Orders of tasks do not care how long they are, so another order of microbatches can be judged by
playing them again; that takes no list schedule.
"""

from __future__ import annotations

from random import Random

from npu_pipe.planner.clock import Clock
from npu_pipe.planner.play import play
from npu_pipe.planner.problem import Orders, Problem, with_turns

__all__ = ["better_turns", "first_turns", "kick_turns"]


def first_turns(problem: Problem) -> list[Problem]:
    """The problem with its microbatches as they are, rising, and falling."""
    m = problem.microbatches
    by_length = sorted(range(m), key=lambda turn: (sum(problem.duration[turn::m]), turn))
    rising = by_length[::2] + by_length[1::2][::-1]
    falling = by_length[::-1][::2] + by_length[::-1][1::2][::-1]
    orders = [tuple(problem.turns[turn] for turn in turns) for turns in (rising, falling)]
    return [problem, *(with_turns(problem, order) for order in orders)]


def better_turns(
    problem: Problem, orders: Orders, *, tries: int, rng: Random, clock: Clock
) -> Problem:
    """The same orders of tasks, filled with the microbatches in an order at least as good."""
    value = _value(problem, orders)
    for _ in range(tries):
        if clock.is_over:
            break
        other = kick_turns(problem, 1, rng)
        other_value = _value(other, orders)
        if other_value <= value:
            problem, value = other, other_value
    return problem


def kick_turns(problem: Problem, number: int, rng: Random) -> Problem:
    """The problem after a number of random swaps and shifts of microbatches."""
    turns = list(problem.turns)
    for _ in range(number):
        one, two = rng.sample(range(len(turns)), 2)
        if rng.random() < 0.5:
            turns[one], turns[two] = turns[two], turns[one]
        else:
            turns.insert(two, turns.pop(one))
    return with_turns(problem, tuple(turns))


def _value(problem: Problem, orders: Orders) -> float:
    played = play(problem, orders)
    assert played is not None, "whether orders can run does not depend on times"
    return played.value
