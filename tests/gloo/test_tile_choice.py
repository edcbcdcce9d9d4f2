"""The number of tiles is measured: what is found, and what goes wrong meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster

from npu_pipe.errors import ConfigError
from npu_pipe_kernels.tile_choice import Measured

Get = Callable[[int], Cluster]

TIMEOUT_S = 2.0


@pytest.mark.timeout(120)
def test_a_slow_wire_between_slow_products_is_measured_to_be_worth_tiles(cluster: Get) -> None:
    """Each takes 20 ms, one after the other; in tiles they overlap."""
    found = cluster(2).values("tile_choice.measured", product_ms=20, wire_ms=20)
    assert found[0] == found[1]
    assert found[0]["0"] >= 4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("link", ["fastest", "gloo"])
def test_a_fault_in_the_trial_is_named_by_every_other_rank(
    cluster: Get, link: str, tmp_path: Path
) -> None:
    """The others wait for it on a link that the pipeline does not know yet."""
    job = {"fault": "raise", "link": link, "note": str(tmp_path / "moment"), "limit_s": TIMEOUT_S}
    found = cluster(3).values("tile_choice.struck_while_it_measures", **job)
    assert found.pop(1)["said"] == "ValueError: the injected fault"
    for each in found:
        assert each["said"].startswith("PeerError: every rank runs its part of a call to the end")
        assert "rank 1 failed" in each["said"]
        assert each["seconds"] < TIMEOUT_S + 5


@pytest.mark.timeout(120)
@pytest.mark.parametrize("link", ["fastest", "gloo"])
def test_a_rank_that_is_killed_in_the_trial_is_named_by_every_other_rank(
    cluster: Get, link: str, tmp_path: Path
) -> None:
    job = {"fault": "kill", "link": link, "note": str(tmp_path / "moment"), "limit_s": TIMEOUT_S}
    ranks = cluster(3)
    for answer in ranks.survivors("tile_choice.struck_while_it_measures", dead=1, **job):
        assert answer.error is None, answer.trace
        assert "rank 1 was killed" in answer.value["said"]
        assert answer.value["seconds"] < TIMEOUT_S + 5
    ranks.kill()


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"rows": 4, "most": 0}])
def test_less_than_one_row_or_tile_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"one tile or more; (rows|most) is 0"):
        Measured(**sizes)
