"""Boundaries in tiles where something is unusual, or goes wrong between two tiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]

TIMEOUT_S = 2.0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("link", ["fastest", "gloo"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("fault", ["raise", "kill", "stall"])
def test_a_fault_between_two_tiles_is_named_by_every_other_rank(
    cluster: Get, fault: str, backward: bool, link: str, tmp_path: Path
) -> None:
    """The next rank waits in the middle of its product, and the one behind it too: not theirs."""
    rank = 2 if backward else 0
    job: dict[str, Any] = {
        "rank": rank,
        "fault": fault,
        "link": link,
        "backward": backward,
        "limit_s": TIMEOUT_S,
        "note": str(tmp_path / "moment"),
    }
    ranks = cluster(3)
    if fault == "kill":
        said = [a.value for a in ranks.survivors("tiles_wrong.struck", dead=rank, **job)]
        ranks.kill()
    else:
        said = ranks.values("tiles_wrong.struck", **job)
        own = said.pop(rank)
        assert own["error"] == ("ValueError" if fault == "raise" else "PeerError")
    assert len({each["text"] for each in said}) == 1, said
    for each in said:
        assert each["error"] == "PeerError"
        assert f"; rank {rank} " in each["text"]
        assert f" in {rank}{'B' if backward else 'F'}2 of step 2 (stage {rank}" in each["text"]
        assert ("ValueError: the injected fault" in each["text"]) == (fault == "raise")
        assert each["seconds"] < TIMEOUT_S + 2


@pytest.mark.timeout(60)
def test_a_pipeline_goes_on_after_a_product_that_broke(cluster: Get) -> None:
    answers = cluster(3).values("tiles_wrong.resets")
    losses = answers[0]["losses"]
    assert losses == [losses[0]] * 5
    assert [each["losses"] for each in answers] == [losses] * 3
    assert [each["in_use"] for each in answers] == [0] * 3
    assert answers[0]["said"] == "ValueError: the second tile is broken"
    for each in answers[1:]:
        assert "rank 0 failed in 0F0 of step 2" in each["said"]


@pytest.mark.timeout(60)
def test_shapes_may_change(cluster: Get) -> None:
    for differences in cluster(2).values("tiles_wrong.shapes_change"):
        assert max(differences) < 1e-14


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_frozen_layers_get_no_gradient(cluster: Get, name: str) -> None:
    for same in cluster(2).values("tiles_wrong.frozen", name=name):
        assert same
        assert all(same)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_autocast_computes_in_its_dtype(cluster: Get, name: str) -> None:
    """In bfloat16 the untiled run differs from float32 by one in a hundred."""
    for differences in cluster(2).values("tiles_wrong.autocast", name=name):
        assert max(differences) < 1e-3


@pytest.mark.timeout(60)
def test_a_stage_begins_before_its_input_is_whole(cluster: Get) -> None:
    """A wait in the middle of an action counts as a part of it, not as one before it."""
    first, second = cluster(2).values("tiles_wrong.begins_early")
    assert first == second
    assert first["early_ms"] > 30
    assert 0 <= first["ends_after_ms"] < 30
    assert first["waited_ms"] > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            "no linear layer",
            "ConfigError: a boundary is crossed in tiles where an nn.Linear is next to it, last or "
            "first of an nn.Sequential and without hooks; stage 0 does not end with one, and "
            "stage 1 does not begin with one",
        ),
        ("a hook", "ConfigError: a boundary is crossed in tiles where an nn.Linear is next to it"),
        ("others", "HandshakeError: all ranks have the same tiles; [[0, 3]] on rank 0, but "),
        ("others measured", "HandshakeError: all ranks have the same tiles; Measured(rows=2, "),
        ("one rank measures", "HandshakeError: all ranks have the same tiles; Measured(rows=2, "),
        (
            "one rank",
            "HandshakeError: all ranks have the same call; Pipeline in tiles on rank 0, but",
        ),
        ("none", "ConfigError: a value crosses a boundary in 1 tile or more; 0 were asked for"),
        (
            "no boundary",
            "ConfigError: tiles travel between two stages on different ranks; 1f1b has no such "
            "boundary after stage 7; name the stage before one: 0",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(cluster: Get, case: str, told: str) -> None:
    said = cluster(2).values("tiles_wrong.refused", case=case)
    assert said[0] == said[1]
    assert said[0].startswith(told)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("case", "layer"),
    [
        ("a late hook", "BoundaryLinear"),
        ("a late hook on the given stage", "Linear"),
        ("a late hook on all modules", "BoundaryLinear"),
    ],
)
def test_a_hook_that_comes_too_late_is_refused(cluster: Get, case: str, layer: str) -> None:
    """What it made of the output did not cross: its rows had left. One on the stage that `tiled`
    was given was not called at all."""
    first, second = cluster(2).values("tiles_wrong.refused", case=case)
    assert first.startswith("ConfigError: where a stage works in tiles there are no hooks")
    assert f"stage 0 has one on its {layer}; register it before `tiled`" in first
    assert "rank 0 failed" in second


@pytest.mark.timeout(60)
def test_two_values_are_not_cut(cluster: Get) -> None:
    first, second = cluster(2).values("tiles_wrong.refused", case="two values")
    assert first.startswith("DataError: one tensor with rows crosses a boundary that is cut into")
    assert "stage 0 returned float64 (2, 6) with gradient, 1" in first
    assert "rank 0 failed in 0F0" in second


@pytest.mark.timeout(60)
def test_boundaries_without_a_linear_layer_are_left_alone(cluster: Get) -> None:
    for links in cluster(2).values("tiles_wrong.left_alone"):
        assert links == ["SharedLink", "SharedLink", "TiledLink"]


@pytest.mark.timeout(60)
def test_buffers_are_used_again(cluster: Get) -> None:
    """How many of a window's 24 messages are under way at once depends on how far each rank is,
    and memory is made in pieces that double. 20 windows have 480."""
    for counts in cluster(2).values("tiles_wrong.memory_is_used_again"):
        assert max(counts) <= 2 * 24
