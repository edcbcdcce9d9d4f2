"""Pieces that schedules are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from npu_pipe.ir.action import Action, Kind

__all__ = ["alternate", "backward", "forward"]


def forward(stage: int, microbatch: int) -> Action:
    return Action(Kind.F, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    return Action(Kind.B, stage, microbatch)


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int
) -> tuple[Action, ...]:
    """`warmup` forwards (or all there are), then a forward and a backward in turn, then the
    remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return (*forwards[:warmup], *chain.from_iterable(pairs), *backwards[steady:])
