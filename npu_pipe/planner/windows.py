"""Large-neighbourhood search: let a span of time of the best schedule be solved again, and
again elsewhere. [Shaw 1998]

    rank 0   F F F F F|I W F I W F|I W I W W       fixed | free | fixed
    rank 1   F F F F I|F I W F I W|I W I W W

A span that is solved in no time grows; one that is not shrinks.
"""

from __future__ import annotations

from random import Random

from npu_pipe.planner.clock import Clock
from npu_pipe.planner.cpsat import solve_window
from npu_pipe.planner.play import play
from npu_pipe.planner.problem import Orders, Problem

__all__ = ["improve_by_windows"]

_TASKS = 240  # of the first window
_LEAST = 60
_PATIENCE_S = 2.0


def improve_by_windows(
    problem: Problem, orders: Orders, *, rng: Random, goal: float, clock: Clock
) -> tuple[float, Orders]:
    """Orders at least as good, and their value; at the end of the time, or at the goal."""
    played = play(problem, orders)
    assert played is not None, "windows are cut from orders that can run"
    value, size = played.value, min(_TASKS, len(problem))
    while value > goal and clock.left_s > 0:
        by_start = sorted(played.sequence, key=played.start.__getitem__)
        at = rng.randint(-size // 2, len(problem) - size // 2)
        seconds = min(_PATIENCE_S, clock.left_s)
        solved = solve_window(
            problem,
            orders,
            by_start[max(at, 0) : at + size],
            time_limit_s=seconds,
            seed=rng.randrange(1 << 30),
        )
        orders, value = solved.orders, solved.value
        again = play(problem, orders)
        assert again is not None, "a solver gives orders that can run"
        played = again
        size = int(size * 1.05) if solved.is_done else max(_LEAST, int(size * 0.8))
        size = min(size, len(problem))
    return value, orders
