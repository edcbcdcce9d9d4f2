"""`npu-pipe verify` says yes to an honest pipeline, and no to one with a fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_an_honest_pipeline_is_verified(cluster: Get, schedule: str) -> None:
    assert cluster(2).values("verifying.honest", schedule=schedule) == [True, True]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "fault", ["other parameters", "one gradient is scaled", "one microbatch is computed wrong"]
)
def test_a_fault_in_one_stage_is_found(cluster: Get, fault: str) -> None:
    assert cluster(2).values("verifying.faulty", fault=fault) == [False, False]


@pytest.mark.timeout(60)
def test_targets_of_other_samples_are_found(cluster: Get) -> None:
    """DeepSpeed#5729: labels and outputs of different microbatches met in the loss."""
    assert cluster(2).values("verifying.samples_mixed_up") == [False, False]
