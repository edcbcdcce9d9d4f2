"""Pieces that schedules are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat

from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.bulk import make_all
from npu_pipe.ir.placement import linear
from npu_pipe.ir.schedule import Schedule

__all__ = ["actions", "alternate", "alternate_split", "in_step", "one_stage_split"]


def actions(kind: Kind, stages: int | Iterable[int], microbatches: Iterable[int]) -> list[Action]:
    """One action a microbatch, all of one stage or each of its own."""
    stages = repeat(stages) if isinstance(stages, int) else stages
    return make_all(Action, repeat(kind), stages, microbatches)


def in_step(*columns: Iterable[Action | None]) -> list[Action]:
    """The first of each column, then the second of each, and so on while all have one; None is
    left out."""
    return list(filter(None, chain.from_iterable(zip(*columns, strict=False))))


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int
) -> tuple[Action, ...]:
    """`warmup` forwards (or all there are), then a forward and a backward in turn, then the
    remaining backwards."""
    return (*forwards[:warmup], *in_step(_then_none(forwards[warmup:]), backwards))


def alternate_split(
    forwards: Sequence[Action],
    input_grads: Sequence[Action],
    weight_grads: Sequence[Action],
    *,
    warmup: int,
    lag: int,
) -> tuple[Action, ...]:
    """`warmup` forwards (or all there are), then F, I and W in turn, a W `lag` behind its I, then
    what remains of I and W."""
    lag = min(lag, len(weight_grads))
    late = chain(repeat(None, lag), weight_grads)
    return (
        *forwards[:warmup],
        *in_step(_then_none(forwards[warmup:]), input_grads, late),
        *weight_grads[len(weight_grads) - lag :],
    )


def one_stage_split(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    warmup: Callable[[int], int],
    lag: Callable[[int], int],
) -> Schedule:
    """One stage a rank, backwards split, in the order of `alternate_split`.

    warmup, lag: of a rank.
    """

    def order(rank: int) -> tuple[Action, ...]:
        chains = (actions(kind, rank, range(microbatches)) for kind in (Kind.F, Kind.I, Kind.W))
        return alternate_split(*chains, warmup=warmup(rank), lag=lag(rank))

    return Schedule(name, microbatches, linear(ranks), tuple(map(order, range(ranks))))


def _then_none(steps: Iterable[Action]) -> Iterable[Action | None]:
    return chain(steps, repeat(None))
