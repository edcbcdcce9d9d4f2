"""After a failure that every rank has caught, a pipeline goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("schedule", "fault", "rank", "action"),
    [
        ("1f1b", "raise", 0, "0F3"),
        ("zb-v", "raise", 2, "3I1"),
        ("interleaved-1f1b", "stall", 1, "1B0"),
        ("dualpipe-v", "raise", 0, "5W0"),
    ],
)
def test_a_pipeline_that_failed_is_reset_and_goes_on(
    cluster: Get, schedule: str, fault: str, rank: int, action: str, tmp_path: Path
) -> None:
    """Twice: what the broken windows left behind must not be taken for the next one's."""
    answers = cluster(3).values(
        "injections.reset_after",
        schedule=schedule,
        rank=rank,
        action=action,
        fault=fault,
        limit_s=2.0,
        note=str(tmp_path / "moment"),
    )
    for other, answer in enumerate(answers):
        assert len(set(answer["losses"])) == 1
        assert len(answer["losses"]) == 5
        first, second = answer["said"]
        if fault == "raise" and other == rank:
            assert first == second == "ValueError: the injected fault"
        else:
            assert f"rank {rank} " in first
            assert f"in {action} of step 2" in first
            assert f"in {action} of step 4" in second


@pytest.mark.timeout(60)
def test_a_rank_that_leaves_early_is_named(cluster: Get) -> None:
    answers = cluster(3).values("injections.leaves_early", rank=1)
    assert answers.pop(1) == "done"
    for answer in answers:
        assert answer.startswith("PeerError")
        assert "rank 1 closed its pipeline after step 2" in answer


@pytest.mark.timeout(60)
@pytest.mark.parametrize("link", ["fastest", "gloo"])
def test_a_connection_that_breaks_ends_the_step_of_all_ranks(cluster: Get, link: str) -> None:
    answers = cluster(4).values("injections.loses_a_connection", rank=2, link=link)
    for answer in answers:
        assert re.search(r"; rank \d lost a connection .* of step 1 \(stage ", answer["text"])
        assert answer["seconds"] < 8


@pytest.mark.timeout(60)
def test_a_pipeline_leaves_no_thread_and_no_file_behind(cluster: Get) -> None:
    before = set(Path("/dev/shm").glob("npu_pipe_*"))
    for counts in cluster(2).values("injections.threads_and_files"):
        assert counts == [[[], []]] * 3
    assert set(Path("/dev/shm").glob("npu_pipe_*")) == before


SCRIPT = """
from jobs.models import data, stage
from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from torch import nn

world = World.from_environment()
schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
loss = MeanLoss(nn.functional.mse_loss)
pipes = [
    Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=loss, world=world)
    for _ in range(2)
]
for _ in range(3):
    first, second = (pipe.step(data(8)).loss for pipe in pipes)
    assert first == second
"""


@pytest.mark.timeout(60)
def test_a_script_that_closes_nothing_ends_without_noise(tmp_path: Path) -> None:
    """Two pipelines in each process, and a watch beside each when the interpreter ends."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", "3", "script.py"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parent),
        },
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("link", ["fastest", "gloo"])
def test_a_message_that_is_lost_is_told_by_all_with_one_table(cluster: Get, link: str) -> None:
    answers = cluster(3).values("injections.loses_a_message", rank=1, link=link)
    for answer in answers:
        assert "all ranks wait for each other" in answer["text"]
        assert "rank 2 is before 2F2 of step 2" in answer["text"]
    tables = [answer["printed"] for answer in answers]
    assert tables[1:] == ["", ""]
    assert "\n2     2F2 of step 2  input      rank 1  " in tables[0]
