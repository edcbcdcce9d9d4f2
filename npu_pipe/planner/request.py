"""What is asked of a search, checked."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from npu_pipe.errors import CostsError, ScheduleError
from npu_pipe.ir.placement import linear
from npu_pipe.planner.problem import Problem, make_problem
from npu_pipe.simulator.costs import Costs

__all__ = [
    "Objective",
    "Request",
    "check_objective",
    "check_time_limit",
    "make_caps",
    "make_placement",
]


class Objective(enum.StrEnum):
    """What is made small; see `Timeline.makespan` and `Timeline.span`."""

    MAKESPAN = "makespan"
    SPAN = "span"


@dataclass(frozen=True, slots=True)
class Request:
    """caps: per rank, the most stage activations held."""

    costs: Costs
    placement: tuple[int, ...]
    caps: tuple[int, ...]
    microbatches: int
    is_split: bool
    objective: Objective

    def problem(self) -> Problem:
        return make_problem(
            self.costs,
            placement=self.placement,
            caps=self.caps,
            turns=tuple(range(self.microbatches)),
            is_split=self.is_split,
            is_span=self.objective is Objective.SPAN,
        )

    @property
    def is_uneven(self) -> bool:
        """Whether microbatches differ in length."""
        return len(set(self.costs.microbatch_scale)) > 1

    @property
    def is_exact(self) -> bool:
        """Whether a solver's bound for the problem holds for the objective: transfers are
        delays, and if times count from a rank's first start, nothing can put that off."""
        if self.objective is Objective.SPAN:
            ranks = len(self.caps)
            if self.is_uneven or set(self.placement[:ranks]) != set(range(ranks)):
                return False
        return self.costs.overlapped


def check_time_limit(time_limit_s: float) -> None:
    """Raise ScheduleError unless it is a number of at least 0."""
    if type(time_limit_s) not in (int, float) or not 0 <= time_limit_s < math.inf:
        raise ScheduleError(
            "time_limit_s is a number of at least 0",
            f"it is {time_limit_s!r:.80}",
            "give time_limit_s >= 0",
        )


def check_objective(objective: Objective) -> None:
    """Raise ScheduleError for what is none; its word is one, too."""
    if objective not in list(Objective):
        raise ScheduleError(
            f"objective is one of {', '.join(Objective)}",
            f"it is {objective!r:.80}",
            "give Objective.MAKESPAN or Objective.SPAN",
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
    given = max_activations if isinstance(max_activations, Sequence) else [max_activations] * ranks
    caps = [cap for cap in given if type(cap) is int]
    if not len(caps) == len(given) == ranks:
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
