"""The same commands under msrun, torchrun and mpirun; how their jobs end, and that they do."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import PATIENCE_S, Launched, wait_until

pytestmark = pytest.mark.timeout(400, func_only=True)

HERE = Path(__file__).parent
CONFIG = HERE.parent.parent / "configs" / "gpt_tiny.toml"
Start = Callable[..., None]

# How long the ranks of a launcher that is gone may stay, and a job that has lost a rank. It takes
# about 1.5 and 5 seconds, and on a machine that is busy with other things longer.
GONE_S = 10.0
LOST_S = 30.0


def worker(mode: str) -> list[str]:
    return [sys.executable, str(HERE / "worker.py"), mode]


def train(ranks: int) -> list[str]:
    small = [
        "--run.steps=2",
        "--data.batch=8",
        "--data.sequence=32",
        "--data.validation-fraction=0",
    ]
    sizes = [f"--pipeline.ranks={ranks}", "--pipeline.microbatches=4", "--run.folder=run"]
    return [sys.executable, "-m", "npu_pipe", "train", str(CONFIG), *sizes, *small]


def broken_backend(folder: Path) -> None:
    """A torch_npu without CANN: it is loaded by `import torch`, unless that is told not to."""
    (folder / "broken_backend.py").write_text("raise ImportError('libhccl.so: no such file')\n")
    told = folder / "broken_backend-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-backend\nVersion: 1\n")
    (told / "entry_points.txt").write_text("[torch.backends]\nbroken = broken_backend:load\n")


@pytest.mark.parametrize("ranks", [2, 4])
def test_gpt_tiny_trains(job: Launched, start: Start, launcher: str, ranks: int) -> None:
    if launcher == "mpirun" and ranks == 4:
        pytest.skip("two ranks tell all there is to tell of mpirun")
    if launcher != "torchrun":  # whose own agent imports torch
        broken_backend(job.folder)
        job.environ["PYTHONPATH"] += os.pathsep + str(job.folder)
    start(train(ranks), ranks)
    assert job.end(within_s=PATIENCE_S) == [0], job.output()
    lines = (job.folder / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if line["kind"] == "update"]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert "Traceback" not in job.output()


def test_a_script_that_names_no_launcher_runs_on_two_nodes(
    job: Launched, start: Start, launcher: str
) -> None:
    nodes = 1 if launcher == "mpirun" else 2
    start(worker("step"), 4, nodes)
    assert job.end(within_s=PATIENCE_S) == [0] * nodes, job.output()
    said = job.said()
    assert [line.split(" by ")[0] for line in said] == [f"rank {rank} of 4" for rank in range(4)]
    assert len({line.split(": ")[1] for line in said}) == 1  # one loss, the same on every rank


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_killed_rank_ends_the_job_in_seconds_and_the_others_name_it(
    job: Launched, start: Start, launcher: str, nodes: int
) -> None:
    if launcher == "mpirun" and nodes == 2:
        pytest.skip("mpirun starts other nodes by itself, through ssh")
    start(worker("on"), 2, nodes)
    os.kill(job.ranks(2)[1], signal.SIGKILL)
    statuses = job.end(within_s=LOST_S)
    assert all(statuses), statuses
    if nodes == 2:  # on one node the launcher may be faster than rank 0
        assert "PeerError" in job.output()
        assert "rank 1" in job.output()


def test_a_rank_that_raises_ends_the_job_in_seconds_with_the_cause(
    job: Launched, start: Start
) -> None:
    start(worker("raise"), 2)
    job.ranks(2)
    assert all(job.end(within_s=LOST_S))
    assert "ValueError: no such layer" in job.output()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_launcher_that_is_ended_while_models_are_built(
    job: Launched, start: Start, number: signal.Signals
) -> None:
    start(worker("build"), 2)
    job.ranks(2)
    if number is signal.SIGINT:
        job.interrupt()
    else:
        job.send(number)
    job.end(within_s=GONE_S)


def test_nothing_outlives_a_launcher_that_is_killed_while_ranks_talk(
    job: Launched, start: Start
) -> None:
    start(worker("on"), 2)
    job.ranks(2)
    job.send(signal.SIGKILL)
    job.end(within_s=GONE_S)


def test_nothing_outlives_a_launcher_that_is_killed_while_it_trains(
    job: Launched, start: Start, launcher: str
) -> None:
    if launcher != "msrun":
        pytest.skip("msrun tells all there is to tell of the command line")
    start([*train(2), "--run.steps=100000"], 2)
    metrics = job.folder / "run" / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and metrics.stat().st_size > 0,
        within_s=PATIENCE_S,
        otherwise=job.output,
    )
    job.send(signal.SIGKILL)
    job.end(within_s=GONE_S)


def test_a_wrapper_script_of_the_users_ends_with_the_launcher_too(
    job: Launched, start: Start, launcher: str
) -> None:
    if launcher == "msrun":
        pytest.skip("msrun starts Python and nothing else")
    start(["bash", "-c", f"{shlex.join(worker('on'))}; true"], 2)
    job.ranks(2)
    job.send(signal.SIGKILL)
    job.end(within_s=GONE_S)
