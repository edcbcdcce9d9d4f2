"""Boundaries in tiles: the same gradients as unsplit, whatever the schedule, link, or shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster
from jobs.any_schedule import seeds_for
from test_any_schedule import sizes_of

from npu_pipe.schedules.registry import FAMILIES

Get = Callable[[int], Cluster]

LINKS = ("fastest_link", "gloo_link", "device", "staged")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_gives_the_unsplit_gradients(cluster: Get, name: str, ranks: int) -> None:
    """With free buffers full of NaN, from stages that work in tiles at both ends, one, or none."""
    shares = cluster(ranks).values(
        "tiles.train_named",
        name=name,
        microbatches=sizes_of(name, ranks)[-1],
        link="gloo_link" if ranks == 2 else "fastest_link",
        tiles=3,
        shape=[5],
    )
    assert max(shares) > 0, "some of it went while the rest was made"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "link"),
    [(name, link) for name in ("1f1b", "zb-v") for link in LINKS]
    + [("dualpipe", link) for link in LINKS if link != "staged"],
)
def test_every_link_carries_tiles(cluster: Get, name: str, link: str) -> None:
    microbatches = sizes_of(name, 2)[-1]
    cluster(2).values(
        "tiles.train_named", name=name, microbatches=microbatches, link=link, tiles=4, shape=[3, 3]
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("link", LINKS[:2])
def test_random_schedules_give_the_unsplit_gradients(cluster: Get, link: str) -> None:
    for ranks in (2, 3):
        cluster(ranks).values("tiles.train_random", seeds=seeds_for(ranks, 6), link=link, tiles=3)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("tiles", "shape"),
    [(1, [4]), (7, [3]), (5, [1]), (2, [1, 1]), (4, [2, 3, 2])],
    ids=["one tile", "more tiles than rows", "one row", "one row of three dimensions", "four"],
)
def test_rows_need_not_divide(cluster: Get, tiles: int, shape: list[int]) -> None:
    cluster(2).values(
        "tiles.train_named",
        name="zb-v",
        microbatches=3,
        link="fastest_link",
        tiles=tiles,
        shape=shape,
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("link", LINKS)
def test_the_number_of_tiles_may_be_measured(cluster: Get, link: str) -> None:
    """By a trial on the link that trains; afterwards it goes other ways."""
    for name in ("zb-v", "1f1b") if link == "staged" else ("zb-v", "dualpipe"):
        cluster(2).values(
            "tiles.train_named", name=name, microbatches=4, link=link, tiles=0, shape=[5]
        )
