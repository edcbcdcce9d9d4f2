"""A rank that fails on its device takes the others along in time, with the cause."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

PLACE = "in 1F1 of step 2 (stage 1, forward of microbatch 1)"


@pytest.mark.timeout(120)
def test_an_error_on_one_rank_reaches_the_other_with_its_place(
    npus: Callable[..., Cluster],
) -> None:
    """And leaves both able to train: the next pipeline does."""
    cluster = npus(2)
    first, second = cluster.values("faults.fails", name="1f1b", kind="raise", at=1, limit_s=20)
    assert (first["kind"], second["kind"]) == ("PeerError", "ValueError")
    assert f"rank 1 failed {PLACE}: ValueError: the stage is broken" in first["text"]
    assert first["seconds"] < 5
    cluster.values("training.equals_cpu", name="1f1b", microbatches=4)


@pytest.mark.timeout(120)
def test_a_rank_that_is_killed_is_missed_at_once(npus: Callable[..., Cluster]) -> None:
    cluster = npus(2)
    (left,) = cluster.survivors("faults.fails", dead=1, name="1f1b", kind="kill", at=1, limit_s=20)
    assert left.value["kind"] == "PeerError"
    assert f"rank 1 was killed (or its machine was lost) {PLACE}" in left.value["text"]
    assert left.value["seconds"] < 5
    cluster.kill()


@pytest.mark.timeout(120)
def test_a_device_that_is_stuck_is_found_by_what_it_is_at_and_not_its_host(
    npus: Callable[..., Cluster],
) -> None:
    """The host of rank 1 has given all work to the device, and waits for it."""
    cluster = npus(2)
    answers = cluster.values("faults.fails", name="1f1b", kind="stuck device", at=1, limit_s=2)
    for found in answers:
        assert found["kind"] == "PeerError"
        assert f"rank 1 has been {PLACE}" in found["text"]
        assert 2 < found["seconds"] < 10
    cluster.kill()
