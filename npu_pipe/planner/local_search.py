"""Tabu search on the critical path.

The value is the length of a critical path, a run of blocks: tasks that follow each other on one
rank without a pause. Only a move over the first or last task of a block can shorten it:

    block      F4 I2 W1 F5           I2 W1 F5 F4   F4 over the rest
                                     F5 F4 I2 W1   F5 before the rest, ...

A move is judged by the longest way through the tasks that it shifts, the rest unchanged: a
lower bound of what comes out, and mostly exact. The best of all that do not undo a recent move
is taken, better or not. [Nowicki & Smutnicki 1996; Balas & Vazacopoulos 1998]
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from npu_pipe.planner.clock import Clock
from npu_pipe.planner.play import Play, play, tails
from npu_pipe.planner.problem import Orders, Problem

__all__ = ["improve"]

_REACH = 12  # tasks that one move shifts at most
_TENURE = (8, 20)  # moves for which one may not be undone


class _Move(NamedTuple):
    """On a rank, order[at:at+len(tasks)] becomes tasks; `mover` goes over the others."""

    rank: int
    at: int
    tasks: list[int]
    mover: int
    is_later: bool


def improve(
    problem: Problem,
    orders: Orders,
    *,
    rng: Random,
    moves: int,
    goal: float,
    clock: Clock,
) -> tuple[float, Orders]:
    """The best orders met within a number of moves, and their value.

    Stops early at a value of `goal`, which nothing can beat, or when the time is over.
    """
    current = [list(order) for order in orders]
    played = play(problem, current)
    assert played is not None, "a search starts from orders that can run"
    best, best_orders = played.value, [list(order) for order in current]
    tabu: dict[tuple[int, int], int] = {}  # (x, y): x may not come before y again until then
    since_best = 0
    for number in range(moves):
        if best <= goal or clock.is_over:
            break
        if since_best > 400:
            current = [list(order) for order in best_orders]
            played = play(problem, current)
            assert played is not None, "the best orders can run"
            tabu.clear()
            since_best = 0
        tail = tails(problem, played)
        judged = []
        for move in _moves(problem, current, played, rng):
            value = _estimate(problem, current, played, tail, move)
            if value < best - 1e-12 or not _is_tabu(tabu, move, number):
                judged.append((value, rng.random(), move))
        judged.sort()
        for _, _, move in judged[:8]:
            order = current[move.rank]
            where = slice(move.at, move.at + len(move.tasks))
            before = order[where]
            order[where] = move.tasks
            after = play(problem, current) if _keeps_cap(problem, order, move.rank) else None
            if after is not None:
                played = after
                break
            order[where] = before
        else:
            since_best = 1000
            rng.random()
            continue
        until = number + rng.randint(*_TENURE)
        for other in move.tasks:
            if other != move.mover:
                undo = (move.mover, other) if move.is_later else (other, move.mover)
                tabu[undo] = until
        since_best += 1
        if played.value < best - 1e-12:
            best, best_orders = played.value, [list(order) for order in current]
            since_best = 0
    return best, best_orders


def _is_tabu(tabu: dict[tuple[int, int], int], move: _Move, number: int) -> bool:
    for other in move.tasks:
        pair = (other, move.mover) if move.is_later else (move.mover, other)
        if tabu.get(pair, -1) >= number:
            return True
    return False


def _moves(problem: Problem, orders: Orders, played: Play, rng: Random) -> Iterator[_Move]:
    """All moves over the first or last task of a block of one critical path."""
    for rank, first, last in _blocks(problem, orders, played, rng):
        order = orders[rank]
        for at in range(max(first, last - _REACH), last):  # later, over the last
            if _may_pass(problem, order[at], order[at + 1 : last + 1]):
                yield _Move(rank, at, [*order[at + 1 : last + 1], order[at]], order[at], True)
        for at in range(first + 1, min(last, first + _REACH) + 1):  # earlier, over the first
            if all(_may_pass(problem, x, [order[at]]) for x in order[first:at]):
                yield _Move(rank, first, [order[at], *order[first:at]], order[at], False)
        for at in range(first + 1, min(last, first + _REACH) + 1):  # the first, over some
            if at < last and _may_pass(problem, order[first], order[first + 1 : at + 1]):
                tasks = [*order[first + 1 : at + 1], order[first]]
                yield _Move(rank, first, tasks, order[first], True)
        for at in range(max(first + 1, last - _REACH), last):  # the last, over some
            if all(_may_pass(problem, x, [order[last]]) for x in order[at:last]):
                yield _Move(rank, at, [order[last], *order[at:last]], order[last], False)


def _may_pass(problem: Problem, task: int, others: list[int]) -> bool:
    """Whether a task may run after others that it ran before, as far as needs go."""
    m = problem.microbatches
    return not any(
        task // m == other // m or task in (problem.own_need(other), problem.source[other])
        for other in others
    )


def _keeps_cap(problem: Problem, order: list[int], rank: int) -> bool:
    size = problem.stages * problem.microbatches
    first_release, held, cap = (problem.kinds - 1) * size, 0, problem.caps[rank]
    for task in order:
        if task < size:
            held += 1
            if held > cap:
                return False
        elif task >= first_release:
            held -= 1
    return True


def _blocks(
    problem: Problem, orders: Orders, played: Play, rng: Random
) -> Iterator[tuple[int, int, int]]:
    """(rank, first index, last index) of each block of two tasks or more, from the end back."""
    start, end = played.start, played.end
    ends = [(end[order[-1]] - problem.offset[rank], rank) for rank, order in enumerate(orders)]
    rank = rng.choice([r for value, r in ends if value >= played.value - 1e-12])
    index = {task: at for order in orders for at, task in enumerate(order)}
    at = last = len(orders[rank]) - 1
    while True:
        task = orders[rank][at]
        begin = start[task]
        before = orders[rank][at - 1] if at else -1
        source = problem.source[task]
        by_rank = at > 0 and end[before] >= begin
        by_source = source >= 0 and end[source] + problem.delay[task] >= begin
        if by_rank and not (by_source and rng.random() < 0.5):
            at -= 1
            continue
        if last > at:
            yield rank, at, last
        if not by_source:
            return
        rank = problem.rank[source]
        at = last = index[source]


def _estimate(
    problem: Problem, orders: Orders, played: Play, tail: list[float], move: _Move
) -> float:
    """The longest way through the tasks that a move shifts."""
    duration, source, delay, user = problem.duration, problem.source, problem.delay, problem.user
    order, end = orders[move.rank], played.end
    time = end[order[move.at - 1]] if move.at else 0.0
    ends = []
    for task in move.tasks:
        if source[task] >= 0:
            time = max(time, end[source[task]] + delay[task])
        time += duration[task]
        ends.append(time)
    after = move.at + len(move.tasks)
    behind = -problem.offset[move.rank]
    if after < len(order):
        behind = tail[order[after]] + duration[order[after]]
    value = 0.0
    for task, time in zip(reversed(move.tasks), reversed(ends), strict=True):
        next_user = user[task]
        if next_user >= 0:
            behind = max(behind, tail[next_user] + duration[next_user] + delay[next_user])
        value = max(value, time + behind)
        behind += duration[task]
    return value
