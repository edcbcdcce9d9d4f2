from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Callable[[int], Cluster]]:
    """cluster(p): p ranks, started when first asked for and kept for the session."""
    clusters: dict[int, Cluster] = {}

    def get(ranks: int) -> Cluster:
        if ranks in clusters and not clusters[ranks].alive:
            clusters.pop(ranks).close()
        return (
            clusters.setdefault(ranks, Cluster(ranks)) if ranks not in clusters else clusters[ranks]
        )

    yield get
    for each in clusters.values():
        each.close()
