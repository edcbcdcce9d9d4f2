"""The searched schedule of a workload, as one more row."""

from __future__ import annotations

from dataclasses import dataclass

from npu_pipe.planner.assess import Assessment, assess
from npu_pipe.planner.search import Found, search
from npu_pipe.planner.workload import Workload

__all__ = ["Searched", "search_row"]


@dataclass(frozen=True, slots=True)
class Searched:
    """caps: per rank, the activations that it was allowed."""

    found: Found
    row: Assessment
    caps: tuple[int, ...]


def search_row(
    workload: Workload,
    caps: tuple[int, ...],
    *,
    microbatches: int,
    time_limit_s: float,
    samples: int,
    seed: int,
) -> Searched:
    """Search with one stage a rank and split backwards.

    caps: per rank, at least 1. Raises CostsError, PartitionError.
    """
    ranks = len(caps)
    costs, memory = workload.stage_costs(ranks), workload.stage_memory(ranks)
    found = search(
        costs,
        ranks=ranks,
        microbatches=microbatches,
        max_activations=caps,
        split_backward=True,
        time_limit_s=time_limit_s,
        seed=seed,
    )
    row = assess("searched", found.schedule, costs, memory=memory, samples=samples, seed=seed)
    return Searched(found, row, caps)
