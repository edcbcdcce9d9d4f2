"""A Slurm job step on two nodes by its environment; a Slurm of one is in test_real_slurm.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launched import PATIENCE_S, Launched

pytestmark = pytest.mark.timeout(400)

WORKER = [sys.executable, str(Path(__file__).parent / "worker.py")]


def start_step(job: Launched) -> None:
    """Four tasks on two nodes, numbered in turn over the nodes, as -m cyclic does."""
    for task in range(4):
        job.start(
            [*WORKER, "step"],
            SLURM_JOB_ID=str(os.getpid()),
            SLURM_STEP_ID="0",
            SLURM_STEP_NUM_TASKS="4",
            SLURM_STEP_TASKS_PER_NODE="2(x2)",
            SLURM_STEP_NODELIST="localhost,node[1-2]",
            SLURM_JOB_NODELIST="localhost,node[1-2]",
            SLURM_PROCID=str(task),
            SLURM_NODEID=str(task % 2),
            SLURM_LOCALID=str(task // 2),
            SLURM_DISTRIBUTION="cyclic",
        )


def test_the_tasks_of_a_step_meet_on_the_first_host_at_a_port_of_their_own(job: Launched) -> None:
    start_step(job)
    assert job.end(within_s=PATIENCE_S) == [0] * 4, job.output()
    said = job.said()
    assert [line.split(":")[0] for line in said] == [f"rank {r} of 4 by srun" for r in range(4)]
    assert len({line.split(": ")[1] for line in said}) == 1
