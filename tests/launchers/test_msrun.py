"""What only msrun does: a scheduler, ranks left alone, and nodes that it cannot number."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import launchers
import pytest
from launched import PATIENCE_S, Launched, free_port, wait_until

pytestmark = [pytest.mark.msrun, pytest.mark.timeout(400, func_only=True)]

WORKER = [sys.executable, str(Path(__file__).parent / "worker.py")]


def test_the_scheduler_leaves_before_torch_is_there_and_the_ranks_say_who_they_are(
    job: Launched, mindspore: Path
) -> None:
    script = job.folder / "who.py"
    script.write_text(
        "import sys, npu_pipe\n"
        "try:\n"
        "    world = npu_pipe.World.from_environment()\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
        "print(world.rank, world.local_rank, world.size, world.sources)\n"
    )
    # What is left over from another launcher, or set for the pod, is not msrun's.
    job.environ |= {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "8", "MASTER_ADDR": "elsewhere"}
    start = launchers.msrun(mindspore)
    job.start(start([sys.executable, str(script)], 2, 1, 0, free_port()))
    assert job.end(within_s=PATIENCE_S) == [0], job.output()
    said, torch = (job.folder / "log0" / "scheduler.log").read_text().splitlines()
    assert said.startswith("npu-pipe: MindSpore's scheduler has nothing to do for torch")
    assert torch == "False"
    for rank in range(2):
        _, who = (job.folder / "log0" / f"worker_{rank}.log").read_text().splitlines()
        assert who.startswith(f"{rank} {rank} 2 Sources(rank='MS_NODE_ID', size='MS_WORKER_NUM',")


def test_nodes_without_a_rank_are_refused_with_the_cure(job: Launched, mindspore: Path) -> None:
    command = launchers.msrun(mindspore)([*WORKER, "step"], 4, 2, 0, free_port())
    job.start([word for word in command if not word.startswith("--node_rank")])
    assert job.end(within_s=PATIENCE_S) != [0]
    assert "give msrun --node_rank=0 on the first node" in job.output()
    assert not list(job.folder.glob("ready*"))


def test_nodes_of_different_sizes_are_refused_with_the_cure(job: Launched, mindspore: Path) -> None:
    port = free_port()
    for node, ranks in enumerate((3, 1)):
        command = launchers.msrun(mindspore)([*WORKER, "step"], 4, 2, node, port)
        job.start([word.replace("_num=2", f"_num={ranks}") for word in command])
    assert all(job.end(within_s=PATIENCE_S))
    assert "two processes say that they are rank 1: process " in job.output()
    assert "the same --local_worker_num on every node" in job.output()


def test_without_join_the_ranks_go_on_alone(job: Launched, mindspore: Path) -> None:
    start = launchers.msrun(mindspore, join=False)
    job.start(start([*WORKER, "step"], 2, 1, 0, free_port()))
    assert job.end(within_s=PATIENCE_S) == [0]
    started = [line.split(":")[0] for line in job.said()]
    assert started == [f"rank {rank} of 2 by msrun" for rank in range(2)]


def test_without_join_a_rank_that_dies_still_ends_the_others(
    job: Launched, mindspore: Path
) -> None:
    start = launchers.msrun(mindspore, join=False)
    job.start(start([*WORKER, "on"], 2, 1, 0, free_port()))
    wait_until(lambda: len(list(job.folder.glob("ready*"))) == 2, within_s=PATIENCE_S)
    pids = [int((job.folder / f"ready{rank}").read_text()) for rank in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    assert job.end(within_s=30) == [0]
    assert "PeerError" in job.output()
