"""The real torch_npu_run: its agent serves a store that only torch_npu can talk to."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ascend_cluster import environment
from launched import Launched, free_port, wait_until

pytestmark = pytest.mark.timeout(150)

WORKER = Path(__file__).parent.parent / "launchers" / "worker.py"


@pytest.fixture
def job(tmp_path: Path, emulator: tuple[Path, Path]) -> Iterator[Launched]:
    job = Launched(tmp_path, {**environment(*emulator, {}), "GLOO_SOCKET_IFNAME": "lo"})
    yield job
    job.close()


def start(job: Launched, site: Path, mode: str, *, nodes: int) -> None:
    port = free_port()
    for node in range(nodes):
        places = ["--master-addr=127.0.0.1", f"--master-port={port}", f"--node-rank={node}"]
        sizes = [f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}"]
        program = [sys.executable, str(site / "bin" / "torch_npu_run")]
        job.start([*program, *places, *sizes, str(WORKER), mode])


SAID = [f"rank {rank} of 2 by torch_npu_run" for rank in range(2)]


def test_the_ranks_meet_at_the_agents_store(job: Launched, emulator: tuple[Path, Path]) -> None:
    start(job, emulator[1], "step", nodes=1)
    assert job.end(within_s=90) == [0], job.output()
    assert [said.split(":")[0] for said in job.said()] == SAID


def test_the_ranks_of_two_nodes_meet_at_the_store_of_the_first(
    job: Launched, emulator: tuple[Path, Path]
) -> None:
    """How the agents end is not looked at: one that still asks the store of another, which has
    ended, asks for ever, whatever its time-out."""
    start(job, emulator[1], "step", nodes=2)
    wait_until(lambda: len(job.said()) == 2, within_s=120, otherwise=job.output)
    assert [said.split(":")[0] for said in job.said()] == SAID
    wait_until(
        lambda: not any(job.left(RANK=rank) for rank in "01"), within_s=20, otherwise=job.output
    )


def test_a_killed_rank_ends_the_job_in_seconds(job: Launched, emulator: tuple[Path, Path]) -> None:
    start(job, emulator[1], "on", nodes=1)
    os.kill(job.ranks(2)[1], signal.SIGKILL)
    assert all(job.end(within_s=30))


def test_nothing_outlives_an_agent_that_is_killed(
    job: Launched, emulator: tuple[Path, Path]
) -> None:
    start(job, emulator[1], "on", nodes=1)
    job.ranks(2)
    job.send(signal.SIGKILL)
    job.end(within_s=10)
