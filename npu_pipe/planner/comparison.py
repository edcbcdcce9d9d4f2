"""Everything that `npu-pipe plan` tells, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from npu_pipe.errors import CostsError
from npu_pipe.planner.assess import Assessment
from npu_pipe.planner.candidates import Refusal, candidates, rank_key
from npu_pipe.planner.limits import Limits
from npu_pipe.planner.recommend import Advice, recommend
from npu_pipe.planner.robustness import samples_for
from npu_pipe.planner.searched import Searched, search_row
from npu_pipe.planner.workload import Workload
from npu_pipe.planner.worth import Worth, judge

__all__ = ["Comparison", "compare"]

_SEARCHABLE = 30_000  # actions; a larger search does not keep to its time


@dataclass(frozen=True, slots=True)
class Comparison:
    """rows: ranked, the searched one among them, their times in one unit.
    searched: None if there was no search; where one was asked for, unsearched tells why. worth: of
    the chosen schedule, of the fastest where none is chosen. samples: of each disturbance, at
    most."""

    ranks: int
    microbatches: int
    limits: Limits
    rows: tuple[Assessment, ...]
    refused: tuple[Refusal, ...]
    searched: Searched | None
    unsearched: str | None
    advice: Advice
    worth: Worth
    samples: int
    seed: int


def compare(
    workload: Workload,
    limits: Limits,
    *,
    ranks: int,
    microbatches: int,
    search_s: float = 0.0,
    seed: int = 0,
) -> Comparison:
    """Assess all schedules for a workload and choose one.

    search_s: how long to search for a better one; 0 for not at all.
    Raises CostsError, PartitionError, and ConfigError for limits that cannot be compared.
    """
    limits.check_known(workload)
    workload.cut(ranks)
    samples = samples_for(ranks, microbatches)
    found = candidates(workload, ranks=ranks, microbatches=microbatches, samples=samples, seed=seed)
    if not any(found.ranked[0].busy):
        raise CostsError(
            "schedules are compared by what they take",
            "all forwards and backwards take no time",
            "give times above 0",
        )
    rows, searched, unsearched = found.ranked, None, None
    if search_s > 0:
        unsearched = _why_not(workload, limits, ranks, microbatches)
    if search_s > 0 and unsearched is None:
        searched = search_row(
            workload,
            limits.caps(workload, ranks=ranks, microbatches=microbatches),
            microbatches=microbatches,
            time_limit_s=search_s,
            samples=samples,
            seed=seed,
        )
        rows = tuple(sorted((*rows, searched.row), key=rank_key))
    rows = tuple(replace(row, scale=rows[0].scale) for row in rows)
    advice = recommend(rows, workload, limits)
    return Comparison(
        ranks=ranks,
        microbatches=microbatches,
        limits=limits,
        rows=rows,
        refused=found.refused,
        searched=searched,
        unsearched=unsearched,
        advice=advice,
        worth=judge(advice.chosen or rows[0], workload, limits),
        samples=samples,
        seed=seed,
    )


def _why_not(workload: Workload, limits: Limits, ranks: int, microbatches: int) -> str | None:
    """Why a search is not even begun."""
    actions = 3 * ranks * microbatches
    if actions > _SEARCHABLE:
        return f"{actions} actions are too many, more than {_SEARCHABLE}"
    if min(limits.caps(workload, ranks=ranks, microbatches=microbatches)) < 1:
        return "a rank that has one stage cannot hold one activation within the limits"
    return None
