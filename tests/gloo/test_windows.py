"""What a window may be made of: uneven rows, other lengths, keywords, auxiliary losses, ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]
pytestmark = pytest.mark.timeout(120)

SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"]


def small(found: list[Any]) -> bool:
    return max(map(max, found)) < 1e-12


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_that_do_not_divide_are_the_whole_batch(cluster: Get, name: str) -> None:
    """pytorch#126600: ten rows in four microbatches."""
    for microbatches, rows in [(4, 10), (4, 7), (8, 9)]:
        found = cluster(2).values("windows.uneven", name=name, microbatches=microbatches, rows=rows)
        assert small(found)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("job", ["other_lengths", "keywords", "metadata", "skips", "evaluation"])
def test_it_is_as_in_the_unsplit_model(cluster: Get, name: str, job: str) -> None:
    if (name, job) == ("dualpipe", "metadata"):
        pytest.skip("its stages count their calls, and two replicas count apart")
    assert small(cluster(2).values(f"windows.{job}", name=name))


OFF = {
    "the second": [[], [0], [], []],
    "the first": [[0], [], [], []],
    "all of the first": [[0, 1], [], [], []],
    "all but one": [[0, 1], [0, 1], [], [0, 1]],
    "in turn": [[0], [1], [], [0, 1]],
}


@pytest.mark.parametrize("link", ["fastest_link", "gloo_link"])
@pytest.mark.parametrize("which", OFF)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-v"])
def test_a_microbatch_may_need_no_gradient(cluster: Get, name: str, which: str, link: str) -> None:
    """Whichever: the first of its form, too."""
    given = {"name": name, "off": OFF[which], "link": link}
    assert small(cluster(2).values("windows.needs_no_gradient", **given))


@pytest.mark.parametrize("job", ["other_lengths", "skips"])
def test_it_is_as_in_the_unsplit_model_on_four_ranks(cluster: Get, job: str) -> None:
    for name in ("1f1b", "interleaved-1f1b", "zb-v"):
        assert small(cluster(4).values(f"windows.{job}", name=name))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rows", [8, 10])
def test_auxiliary_losses_count_once(cluster: Get, name: str, rows: int) -> None:
    assert small(cluster(2).values("windows.auxiliary", name=name, rows=rows))


def test_a_step_that_trains_nothing_is_told(cluster: Get) -> None:
    """It ran silently; torch raises, too, when such a loss goes backward."""
    for refused, ran in cluster(2).values("windows.nothing_to_train"):
        assert "no loss of it needs one" in refused
        assert ran.startswith("loss ")
