"""What no schedule can beat.

For a rank r that may hold c activations (first picture: why it idles before, second: after)

    |-- way to the loss and back --|            |----------- load of r ----------|
    F F F F ....................... I ...  ...  I W W W W .........................
    at most c F before its first I                 at most c W    way back to stage 0, and W

    makespan >= way there and back - c F + load + max(0, way back - c W)

and a slot is taken from the start of its F to the end of its W or B, so c slots cannot serve m
round trips faster than m * round trip / c.
"""

from __future__ import annotations

from heapq import nlargest

from npu_pipe.planner.problem import Problem

__all__ = ["bound", "load_bound", "round_trips"]


def bound(problem: Problem) -> float:
    """A value of the objective that no schedule of these sizes goes below, in any order."""
    starts, trips = _starts(problem), round_trips(problem)
    return max(_bound_of_rank(problem, rank, starts, trips) for rank in range(problem.ranks))


def load_bound(problem: Problem) -> float:
    """The same from the loads alone; it holds also where transfers occupy the ranks."""
    load, starts = [0.0] * problem.ranks, _starts(problem)
    for task, rank in enumerate(problem.rank):
        load[rank] += problem.duration[task]
    best = 0.0
    for rank, time in enumerate(load):
        first = problem.placement.index(rank)
        head = min(start[first] for start in starts)
        best = max(best, time + (0.0 if problem.is_span else head))
    return best


def round_trips(problem: Problem) -> list[float]:
    """Per stage, the least time from the start of an F to the end of its W or B; mean over the
    microbatches."""
    m, stages, last = problem.microbatches, problem.stages, problem.kinds - 1
    trips = [0.0] * stages
    for turn, start in enumerate(_starts(problem)):
        for s in range(stages):
            ends = [
                start[kind * stages + s] + problem.duration[(kind * stages + s) * m + turn]
                for kind in range(1, last + 1)
            ]
            trips[s] += (max(ends) - start[s]) / m
    return trips


def _bound_of_rank(
    problem: Problem, rank: int, starts: list[list[float]], trips: list[float]
) -> float:
    m, stages, cap = problem.microbatches, problem.stages, problem.caps[rank]
    held = [s for s, home in enumerate(problem.placement) if home == rank]
    first, deepest = held[0], held[-1]
    times = [
        [problem.duration[(kind * stages + s) * m + k] for s in held for k in range(m)]
        for kind in range(problem.kinds)
    ]
    origin = [start[first] if problem.is_span else 0.0 for start in starts]
    head, loss = (
        min(start[chain] - begin for start, begin in zip(starts, origin, strict=True))
        for chain in (first, stages + deepest)
    )
    back = 0.0 if problem.is_span else min(_way_back(problem, first, turn) for turn in range(m))
    late = sum(nlargest(cap, times[2])) if problem.is_split else 0.0
    idle_before = max(head, loss - sum(nlargest(cap, times[0])))
    idle_after = max(0.0, back - late)
    slots = head + m * sum(trips[s] for s in held) / cap
    return max(idle_before + sum(map(sum, times)) + idle_after, slots)


def _starts(problem: Problem) -> list[list[float]]:
    """Per microbatch and chain, the earliest start of one that has all ranks for itself."""
    m = problem.microbatches
    times = [(*problem.duration[turn::m], *problem.delay[turn::m]) for turn in range(m)]
    turns = {key: turn for turn, key in enumerate(times)}  # those that differ: mostly one
    starts = {key: _starts_of(problem, turn) for key, turn in turns.items()}
    return [starts[key] for key in times]


def _starts_of(problem: Problem, turn: int) -> list[float]:
    m, stages = problem.microbatches, problem.stages
    start = [0.0] * (problem.kinds * stages)
    down = [kind * stages + s for kind in range(problem.kinds) for s in range(stages)]
    down[stages : 2 * stages] = reversed(down[stages : 2 * stages])
    for chain in down:
        task = chain * m + turn
        for needed, delay in (
            (problem.source[task], problem.delay[task]),
            (problem.own_need(task), 0.0),
        ):
            if needed >= 0:
                ready = start[needed // m] + problem.duration[needed] + delay
                start[chain] = max(start[chain], ready)
    return start


def _way_back(problem: Problem, stage: int, turn: int) -> float:
    """From the end of a stage's I or B to the end of the last W or B."""
    m, stages = problem.microbatches, problem.stages
    way = 0.0
    for s in range(stage + 1):
        task = (stages + s) * m + turn
        if s:
            before = task - m
            way += problem.duration[before] + problem.delay[before]
        if problem.is_split:
            way = max(way, problem.duration[task + stages * m])
    return way
