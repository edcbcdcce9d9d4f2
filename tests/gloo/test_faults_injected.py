"""Faults at random actions of random schedules: every other rank names rank, stage and action."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


@pytest.mark.timeout(60)
def test_a_job_that_is_stopped_as_a_whole_goes_on(cluster: Get, tmp_path: Path) -> None:
    """As by Ctrl-Z, for longer than the time-out: no rank blames another."""
    ranks = cluster(3)
    started, end = tmp_path / "started", tmp_path / "end"

    def pause() -> None:
        while not started.exists():
            time.sleep(0.05)
        ranks.signal(signal.SIGSTOP)
        time.sleep(2 * TIMEOUT_S)
        ranks.signal(signal.SIGCONT)
        end.touch()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(pause)
        steps = ranks.values("injections.runs_until", end=str(end), started=str(started))
        done.result()
    assert len(set(steps)) == 1


@pytest.mark.timeout(60)
def test_a_killed_rank_whose_child_lives_on_is_named_at_once(cluster: Get, tmp_path: Path) -> None:
    """As the worker of a data loader does for some seconds: it lets go of the connections."""
    ranks = cluster(3)
    note = str(tmp_path / "moment")
    answers = ranks.survivors("injections.forks", dead=1, rank=1, note=note)
    ranks.kill()
    for answer in answers:
        assert answer.error is None, answer.trace
        assert "rank 1 was killed" in answer.value["text"]
        assert "in 1F2 of step 2" in answer.value["text"]
        assert answer.value["seconds"] < TIMEOUT_S + 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_to_the_constructor_is_named(cluster: Get, rank: int) -> None:
    answers = cluster(3).values("injections.never_connects", rank=rank)
    assert answers.pop(rank) == "was away"
    for answer in answers:
        assert answer.startswith("PeerError: all 3 ranks meet at 127.0.0.1:")
        assert f"waited in vain for rank {rank};" in answer
