"""Whatever `check` accepts, the runtime trains: random schedules against the unsplit model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from cluster import Cluster
from jobs.any_schedule import seeds_for

from npu_pipe import ScheduleError, build_schedule
from npu_pipe.schedules.registry import FAMILIES

LINKS = ("fastest_link", "gloo_link")


def sizes_of(name: str, ranks: int) -> list[int]:
    """Of these numbers of microbatches, those that the schedule's rule covers."""
    covered = []
    for microbatches in sorted({1, ranks - 1, 2 * ranks, 4 * ranks} - {0}):
        with suppress(ScheduleError):
            build_schedule(name, ranks=ranks, microbatches=microbatches)
            covered.append(microbatches)
    return covered


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_gives_the_unsplit_gradients_bit_for_bit(
    cluster: Callable[[int], Cluster], name: str, ranks: int
) -> None:
    """Over each link, with its free buffers filled with NaN."""
    sizes = sizes_of(name, ranks)
    assert sizes
    for link in LINKS:
        arguments = {"name": name, "sizes": sizes, "link": link}
        cluster(ranks).values("any_schedule.train_named", **arguments)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_schedules_give_the_unsplit_gradients_bit_for_bit(
    cluster: Callable[[int], Cluster], ranks: int
) -> None:
    """Random placements, I and W, fused pairs, two replicas, costs and prefetch depths."""
    for start, link in ((0, "fastest_link"), (10, "gloo_link"), (20, "fastest_link")):
        seeds = seeds_for(ranks, 30)[start : start + 10]
        cluster(ranks).values("any_schedule.train", seeds=seeds, link=link)
