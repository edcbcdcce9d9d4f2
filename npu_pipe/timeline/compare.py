"""Compare a measured timeline with the predicted one, action by action.

What lies between the end of the step before and an action's own end has three parts:

    rank 1   | 1F2 |  waiting  | transfer | 1F3 compute |

transfer: waited for while its input was under way. waiting: the rest, for the rank that sends,
or for the runtime itself. Along a rank the parts add up to the end of its last action, so their
differences add up to how much later than predicted it ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Action, FusedPair
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.timeline.waiting import waits_of

__all__ = ["Comparison", "Difference", "Parts", "compare"]


class Parts(NamedTuple):
    """Times that add up; of a difference, measured less predicted."""

    compute_us: float = 0.0
    transfer_us: float = 0.0
    waiting_us: float = 0.0

    @property
    def total_us(self) -> float:
        return sum(self)

    def less(self, other: Self) -> Parts:
        return Parts(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    @classmethod
    def sum(cls, parts: Iterable[Parts]) -> Parts:
        columns = zip(*(Parts(), *parts), strict=True)
        return cls(*map(sum, columns))


class Difference(NamedTuple):
    """How one action came to end later than predicted (earlier, where negative).

    own: what it and the standing still before it took more. end_us: by how much later it ended,
        the differences before it on its rank included.
    """

    rank: int
    action: Action
    own: Parts
    end_us: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """makespan_us: measured less predicted. ranks: per rank, the sum over its actions.
    differences: one an action, in the order of the measured compute."""

    makespan_us: float
    ranks: tuple[Parts, ...]
    differences: tuple[Difference, ...]

    @property
    def largest(self) -> tuple[Difference, ...]:
        """The actions that differ, those first whose compute and transfer do by most: what they
        waited for others has its cause elsewhere."""

        def own_fault(each: Difference) -> float:
            return abs(each.own.compute_us) + abs(each.own.transfer_us)

        found = [each for each in self.differences if any(each.own)]
        return tuple(sorted(found, key=own_fault, reverse=True))


def compare(measured: Timeline, predicted: Timeline) -> Comparison:
    """Raises ScheduleError unless both have the same actions on the same ranks. A fused pair
    that was run as one cannot be compared with its halves."""
    wanted, found = _parts(predicted), _parts(measured)
    for rank, action in {**wanted, **found}:
        if ((rank, action) in wanted) != ((rank, action) in found):
            where = "measured" if (rank, action) in found else "predicted"
            raise ScheduleError(
                "timelines that are compared have the same actions",
                f"only the {where} one has {action} on rank {rank}",
                "predict the schedule that was measured",
                rank=rank,
                action=str(action),
            )
    differences = tuple(
        Difference(rank, action, parts.less(wanted[rank, action][0]), end - wanted[rank, action][1])
        for (rank, action), (parts, end) in found.items()
    )
    ranks = range(measured.schedule.ranks)
    return Comparison(
        measured.makespan - predicted.makespan,
        tuple(Parts.sum(d.own for d in differences if d.rank == rank) for rank in ranks),
        differences,
    )


def _parts(timeline: Timeline) -> dict[tuple[int, Action], tuple[Parts, float]]:
    """Per rank and action its parts and its end; the halves of a pair share its time."""
    flying = [0.0] * len(timeline.compute)
    for wait in waits_of(timeline):
        flying[wait.step] += wait.flight_us
    ended = [0.0] * timeline.schedule.ranks
    found: dict[tuple[int, Action], tuple[Parts, float]] = {}
    for (rank, step, start, end), flight_us in zip(timeline.compute, flying, strict=True):
        transfer_us = min(flight_us, start - ended[rank])
        parts = Parts(end - start, transfer_us, start - ended[rank] - transfer_us)
        ended[rank] = end
        if isinstance(step, FusedPair):
            half = Parts(parts.compute_us / 2, 0.0, 0.0)
            found[rank, step.forward] = (parts._replace(compute_us=half.compute_us), end)
            found[rank, step.backward] = (half, end)
        else:
            found[rank, step] = (parts, end)
    return found
