"""Whatever `check` accepts, the runtime trains: random schedules against the unsplit model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster
from jobs.any_schedule import seeds_for


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_schedules_give_the_unsplit_gradients_bit_for_bit(
    cluster: Callable[[int], Cluster], ranks: int
) -> None:
    """Random placements, I and W, fused pairs, two replicas, costs and prefetch depths."""
    for start in range(0, 40, 10):
        seeds = seeds_for(ranks, 40)[start : start + 10]
        cluster(ranks).values("any_schedule.train", seeds=seeds)
