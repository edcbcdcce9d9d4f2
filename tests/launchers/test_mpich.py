"""The real mpiexec of MPICH, where it is installed: it tells its ranks very little."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from launched import PATIENCE_S, Launched, free_port, wait_until

pytestmark = pytest.mark.timeout(400)

WORKER = [sys.executable, str(Path(__file__).parent / "worker.py")]


@pytest.fixture
def mpiexec() -> list[str]:
    path = shutil.which("mpiexec.hydra")
    if path is None:
        pytest.skip("mpiexec.hydra: not installed; Debian has it in mpich")
    return [path, "-genv", "MASTER_PORT", str(free_port()), "-n", "2"]


def test_two_ranks_meet_on_loopback(job: Launched, mpiexec: list[str]) -> None:
    job.start([*mpiexec, *WORKER, "step"])
    assert job.end(within_s=PATIENCE_S) == [0], job.output()
    started = [line.split(":")[0] for line in job.said()]
    assert started == [f"rank {rank} of 2 by mpiexec of MPICH" for rank in range(2)]


def test_a_second_job_at_the_same_port_is_told_at_once_and_the_first_goes_on(
    job: Launched, mpiexec: list[str]
) -> None:
    job.start([*mpiexec, *WORKER, "on"])
    first = job.ranks(2)
    job.start([*mpiexec, *WORKER, "step"])
    told = ("is in use", "as rank 1 of 2, which process ")
    wait_until(
        lambda: all(words in job.output() for words in told),
        within_s=PATIENCE_S,
        otherwise=job.output,
    )
    assert set(first) <= set(job.left())


def test_a_killed_rank_ends_the_job(job: Launched, mpiexec: list[str]) -> None:
    job.start([*mpiexec, *WORKER, "on"])
    os.kill(job.ranks(2)[1], signal.SIGKILL)
    assert all(job.end(within_s=30))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_mpiexec(
    job: Launched, mpiexec: list[str], number: signal.Signals
) -> None:
    job.start([*mpiexec, *WORKER, "build"])
    job.ranks(2)
    job.send(number)
    job.end(within_s=20)
