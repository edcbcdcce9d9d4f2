"""The trainer through a pipeline gives the loss curve of the unsplit model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import curve


@pytest.fixture(scope="module")
def unsplit() -> list[list[float]]:
    return curve.unsplit()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-v"])
def test_the_loss_curve_is_the_unsplit_models(
    cluster: Callable[[int], Cluster], unsplit: list[list[float]], schedule: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    found, *_ = cluster(4).values("curve.pipeline", schedule=schedule, folder=folder)
    assert len(found) == 20
    assert found[-1][0] < found[0][0] - 1, "it has learnt something"
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found, unsplit, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-3)
