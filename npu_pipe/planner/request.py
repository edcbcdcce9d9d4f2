"""What is asked of a search, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from npu_pipe.errors import CostsError, ScheduleError
from npu_pipe.ir.placement import linear
from npu_pipe.simulator.costs import Costs

__all__ = ["check_costs", "check_number", "make_caps", "make_placement"]


def check_number(name: str, value: float, *, least: float, is_whole: bool) -> None:
    """Raise ScheduleError unless it is a number of at least `least`."""
    kinds = (int,) if is_whole else (int, float)
    if type(value) not in kinds or not (math.isfinite(value) and value >= least):
        raise ScheduleError(
            f"{name} is a {'whole ' if is_whole else ''}number of at least {least}",
            f"it is {value!r:.80}",
            f"give {name} >= {least}",
        )


def check_costs(costs: Costs, microbatches: int) -> None:
    """Raise CostsError unless the lengths of the microbatches are none, or all."""
    if costs.microbatch_scale and len(costs.microbatch_scale) != microbatches:
        raise CostsError(
            "microbatch_scale has one factor a microbatch, or none",
            f"{microbatches} microbatches were asked for, the costs have "
            f"{len(costs.microbatch_scale)} factors",
            f"give {microbatches} factors",
        )


def make_placement(costs: Costs, ranks: int, placement: Sequence[int] | None) -> tuple[int, ...]:
    """The placement asked for; linear where none is."""
    if placement is None:
        if costs.stages != ranks:
            raise ScheduleError(
                "without a placement, each rank holds one stage",
                f"the costs have {costs.stages} stages, for {ranks} ranks",
                "give a placement (loop or vee of npu_pipe.ir.placement), or costs of "
                f"{ranks} stages",
            )
        return linear(ranks)
    placement = tuple(placement)
    if len(placement) != costs.stages:
        raise CostsError(
            "costs are given for each stage of the placement",
            f"the placement has {len(placement)} stages, the costs have {costs.stages}",
            f"give {len(placement)} values, as in Costs.uniform({len(placement)})",
        )
    if any(type(rank) is not int for rank in placement) or set(placement) != set(range(ranks)):
        raise ScheduleError(
            f"a placement puts each stage on one of the ranks 0..{ranks - 1}, and at least one "
            "on each of them",
            f"it is {placement!r:.80}",
            "mend it, or give another number of ranks",
        )
    return placement


def make_caps(
    max_activations: int | Sequence[int] | None,
    placement: tuple[int, ...],
    *,
    ranks: int,
    microbatches: int,
) -> tuple[int, ...]:
    """Per rank, the most stage activations it may hold; never more than there are."""
    chunks = [placement.count(rank) for rank in range(ranks)]
    if max_activations is None:
        return tuple(count * microbatches for count in chunks)
    is_one = isinstance(max_activations, int)
    caps = [max_activations] * ranks if is_one else list(max_activations)  # type: ignore[arg-type]
    if len(caps) != ranks or any(type(cap) is not int for cap in caps):
        raise ScheduleError(
            "max_activations is a whole number, or one a rank",
            f"for {ranks} ranks it is {max_activations!r:.80}",
            f"give one number, or {ranks} of them",
        )
    for rank, (cap, count) in enumerate(zip(caps, chunks, strict=True)):
        if cap < count:
            raise ScheduleError(
                "a rank holds an activation of each of its stages before the first backward",
                f"rank {rank} has {count} stage{'s' * (count > 1)} and may hold {cap}",
                f"give it max_activations of at least {count}",
                rank=rank,
            )
    return tuple(min(cap, n * microbatches) for cap, n in zip(caps, chunks, strict=True))
