"""Every published schedule that fits the sizes, assessed and ranked; and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from npu_pipe.errors import PartitionError, ScheduleError, UsageError
from npu_pipe.planner.assess import Assessment, assess
from npu_pipe.planner.workload import Workload
from npu_pipe.schedules.registry import FAMILIES, build_schedule
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.memory import Memory

__all__ = ["Candidates", "Refusal", "candidates", "rank_key"]

_CHUNKS = (2, 3, 4)  # tried where a schedule leaves the choice


@dataclass(frozen=True, slots=True)
class Refusal:
    """A schedule that does not fit the sizes."""

    name: str
    error: UsageError


@dataclass(frozen=True, slots=True)
class Candidates:
    """ranked: the shortest makespan first. refused: in the order of the registry."""

    ranked: tuple[Assessment, ...]
    refused: tuple[Refusal, ...]


def candidates(
    workload: Workload, *, ranks: int, microbatches: int, samples: int, seed: int
) -> Candidates:
    """Try every family of the registry. Raises CostsError for costs that do not fit."""

    @cache
    def loads(stages: int) -> tuple[Costs, Memory | None]:
        return workload.stage_costs(stages), workload.stage_memory(stages)

    found, refused = [], []
    for family in FAMILIES:
        errors: list[UsageError] = []
        fits = False
        for name, chunks in _variants(family):
            try:
                schedule = build_schedule(
                    family, ranks=ranks, microbatches=microbatches, chunks=chunks
                )
                costs, memory = loads(schedule.stages)
            except (ScheduleError, PartitionError) as error:
                errors.append(error)
                continue
            fits = True
            found.append(assess(name, schedule, costs, memory=memory, samples=samples, seed=seed))
        if not fits:
            refused.append(Refusal(family, errors[0]))
    return Candidates(tuple(sorted(found, key=rank_key)), tuple(refused))


def rank_key(row: Assessment) -> tuple[float, ...]:
    """Shortest makespan first; of equal ones the leanest."""
    makespan = float(f"{row.makespan:.9g}")  # what floating point makes of equal times
    return (makespan, row.copies, row.held_bytes or row.held, row.crossings)


def _variants(family: str) -> Iterator[tuple[str, int | None]]:
    if not FAMILIES[family].any_chunks:
        yield family, None
        return
    for chunks in _CHUNKS:
        yield f"{family} v={chunks}", chunks
