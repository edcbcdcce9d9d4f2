"""Faults at random actions of random schedules: every other rank names rank, stage and action."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from jobs.injections import Injection, injection, mistakes

Get = Callable[[int], Cluster]

TIMEOUT_S = 2.0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(12))
def test_a_fault_anywhere_is_named_by_every_other_rank(
    cluster: Get, seed: int, tmp_path: Path
) -> None:
    check(cluster, injection(seed), tmp_path)


def check(cluster: Get, case: Injection, tmp_path: Path) -> None:
    ranks = cluster(case.ranks)
    job: dict[str, Any] = {
        "schedule": case.schedule,
        "rank": case.rank,
        "action": case.action,
        "fault": case.fault,
        "link": case.link,
        "limit_s": TIMEOUT_S,
        "note": str(tmp_path / "moment"),
    }
    if case.fault in ("kill", "stop"):
        answers = ranks.survivors("injections.inject", dead=case.rank, **job)
        ranks.kill()
        said = [answer.value for answer in answers]
    else:
        said = ranks.values("injections.inject", **job)
        own = said.pop(case.rank)
        assert own["error"] == ("ValueError" if case.fault == "raise" else "PeerError")
    assert not mistakes(case, said), case
    assert max(each["seconds"] for each in said) < TIMEOUT_S + 2
