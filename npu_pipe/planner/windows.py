"""Large-neighbourhood search: let a span of time of the best schedule be solved again, and
again elsewhere. [Shaw 1998]

    rank 0   F F F F F|I W F I W F|I W I W W       fixed | free | fixed
    rank 1   F F F F I|F I W F I W|I W I W W

A span that is solved in no time grows; one that is not shrinks.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from npu_pipe.planner.best import Best
from npu_pipe.planner.clock import Clock
from npu_pipe.planner.cpsat import solve_window
from npu_pipe.planner.play import play

__all__ = ["improve_by_windows"]

_FIRST, _LEAST = 240, 60  # tasks of a window
_PATIENCE_S = 2.0


def improve_by_windows(best: Best, *, rng: Random, clock: Clock) -> Best:
    """Orders at least as good, at the end of the time or when the bound is met."""
    problem, size = best.problem, min(_FIRST, len(best.problem))
    while not best.is_met and not clock.is_over:
        played = play(problem, best.orders)
        assert played is not None, "windows are cut from orders that can run"
        by_start = sorted(played.sequence, key=played.start.__getitem__)
        at = rng.randint(-size // 2, len(problem) - size // 2)
        solved = solve_window(
            problem,
            best.orders,
            by_start[max(at, 0) : at + size],
            time_limit_s=min(_PATIENCE_S, clock.left_s),
            seed=rng.randrange(1 << 30),
        )
        best = replace(best, orders=solved.orders, value=solved.value)
        size = int(size * 1.05) if solved.is_done else max(_LEAST, int(size * 0.8))
        size = min(size, len(problem))
    return best
