"""Play the orders of all ranks: when each task starts, and the longest way behind it.

The same rule as the simulator's, on plain lists: the search does this many thousand times.
"""

from __future__ import annotations

from typing import NamedTuple

from npu_pipe.planner.problem import Orders, Problem

__all__ = ["Play", "play", "tails"]


class Play(NamedTuple):
    """value: the objective, the largest over ranks of its end less its offset.

    start, end: per task. sequence: all tasks, each after what it needs.
    """

    value: float
    start: list[float]
    end: list[float]
    sequence: list[int]


def play(problem: Problem, orders: Orders) -> Play | None:
    """None where the ranks wait for each other in a circle."""
    duration, source, delay = problem.duration, problem.source, problem.delay
    start, end = [0.0] * len(problem), [-1.0] * len(problem)
    waiting = [-1] * len(problem)
    clock, at = [0.0] * len(orders), [0] * len(orders)
    sequence: list[int] = []
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        order, time = orders[rank], clock[rank]
        for index in range(at[rank], len(order)):
            task = order[index]
            needed = source[task]
            if needed >= 0:
                there = end[needed]
                if there < 0:
                    waiting[needed] = rank
                    at[rank] = index
                    break
                there += delay[task]
                if there > time:
                    time = there
            start[task] = time
            time += duration[task]
            end[task] = time
            sequence.append(task)
            if waiting[task] >= 0:
                ready.append(waiting[task])
        else:
            at[rank] = len(order)
        clock[rank] = time
    if len(sequence) < len(problem):
        return None
    value = max(time - offset for time, offset in zip(clock, problem.offset, strict=True))
    return Play(value, start, end, sequence)


def tails(problem: Problem, played: Play) -> list[float]:
    """Per task, the longest way from its end to the end of all: start + duration + tail is at
    most the value, and is it on a critical path."""
    duration, user, delay, rank_of = problem.duration, problem.user, problem.delay, problem.rank
    tail = [0.0] * len(problem)
    behind = [-offset for offset in problem.offset]
    for task in reversed(played.sequence):
        longest = behind[rank_of[task]]
        after = user[task]
        if after >= 0:
            through = tail[after] + duration[after] + delay[after]
            if through > longest:
                longest = through
        tail[task] = longest
        behind[rank_of[task]] = longest + duration[task]
    return tail
