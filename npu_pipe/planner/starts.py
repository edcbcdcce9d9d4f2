"""Orders to start a search from: list schedules, and the published schedules that fit."""

from __future__ import annotations

from collections.abc import Iterator

from npu_pipe.planner.clock import Clock
from npu_pipe.planner.heuristic import list_schedule, rules
from npu_pipe.planner.play import play
from npu_pipe.planner.problem import Orders, Problem, orders_of
from npu_pipe.schedules.registry import FAMILIES, build_if_covered

__all__ = ["good_starts"]


def good_starts(problem: Problem, *, number: int, clock: Clock) -> list[tuple[float, Orders]]:
    """The best orders of different values, with their values, best first; at least one."""
    found: dict[float, Orders] = {}
    for orders in _candidates(problem):
        played = play(problem, orders)
        if played is not None:
            found.setdefault(played.value, orders)
        if found and clock.is_over:
            break
    return sorted(found.items(), key=lambda item: item[0])[:number]


def _candidates(problem: Problem) -> Iterator[Orders]:
    for name in FAMILIES:
        orders = _published(problem, name)
        if orders is not None:
            yield orders
    for rule in rules(problem):
        yield list_schedule(problem, rule)


def _published(problem: Problem, name: str) -> Orders | None:
    chunks, rest = divmod(problem.stages, problem.ranks)
    if rest:
        return None
    schedule = build_if_covered(
        name, ranks=problem.ranks, microbatches=problem.microbatches, chunks=chunks
    )
    return None if schedule is None else orders_of(problem, schedule)
