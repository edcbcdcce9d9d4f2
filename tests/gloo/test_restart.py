"""A run whose rank is killed goes on by itself, and ends as one that was never interrupted."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from started import NPU_PIPE, TORCHRUN, Started, started, wait_until
from test_resume import without_times
from test_train_command import SMALL

from npu_pipe.train.manifest import latest, read_manifest

pytestmark = pytest.mark.timeout(240)

STEPS = 60
FLAGS = ["--run.steps", str(STEPS), "--run.checkpoint-every", "10", "--run.measure-every", "1000"]
TRAIN = ["train", "job.toml", *FLAGS]
LAUNCHERS = {
    "train": [*NPU_PIPE, *TRAIN, "--max-restarts", "1"],
    "launch": [*NPU_PIPE, "launch", "--nproc", "2", "--max-restarts", "1", *TRAIN],
    "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    + ["-m", "npu_pipe", *TRAIN],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "job.toml").write_text(SMALL)
    with started([*NPU_PIPE, *TRAIN], folder) as run:
        status, _, err = run.end()
    assert status == 0, err
    return folder / "run"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(SMALL)
    return tmp_path


def updates(folder: Path) -> int:
    """Lines of the metrics, as far as they have been written."""
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().count("update") if path.is_file() else 0


def kill(run: Started, rank: int) -> None:
    os.kill(run.rank(rank), signal.SIGKILL)


def assert_same(folder: Path, whole: Path) -> None:
    assert without_times(folder) == without_times(whole)
    ends = [latest(each / "checkpoints") for each in (folder, whole)]
    ours, theirs = (read_manifest(end) for end in ends if end)
    assert ours.step == STEPS
    assert ours == theirs, "every shard has the same bytes"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_and_all_go_on_from_the_last_checkpoint(
    here: Path, whole: Path, launcher: str, rank: int
) -> None:
    with started(LAUNCHERS[launcher], here) as run:
        wait_until(lambda: latest(here / "run" / "checkpoints"), within_s=100)
        kill(run, rank)
        status, out, err = run.end()
    assert status == 0, err
    assert "started anew, time 1: going on after update" in " ".join(out.split())
    assert_same(here / "run", whole)


@pytest.mark.parametrize("launcher", ["train", "torchrun"])
def test_a_rank_killed_before_the_first_checkpoint_begins_again(
    here: Path, whole: Path, launcher: str
) -> None:
    with started(LAUNCHERS[launcher], here) as run:
        wait_until(lambda: updates(here), within_s=100)
        if latest(here / "run" / "checkpoints") is None:
            kill(run, 1)
        status, out, err = run.end()
    assert status == 0, err
    assert "there is no checkpoint yet" in " ".join(out.split())
    assert_same(here / "run", whole)


def test_a_run_killed_before_its_first_checkpoint_goes_on_with_resume(
    here: Path, whole: Path
) -> None:
    with started([*NPU_PIPE, *TRAIN], here) as run:
        wait_until(lambda: updates(here), within_s=100)
        run.process.kill()
        run.end()
    with started([*NPU_PIPE, *TRAIN], here) as run:
        status, _, err = run.end()
    assert (status, err.count("\n")) == (2, 1)
    assert "go on with --resume" in err
    with started([*NPU_PIPE, *TRAIN, "--resume"], here) as run:
        status, _, err = run.end()
    assert (status, err) == (0, "")
    assert_same(here / "run", whole)


def test_more_failures_than_restarts_end_the_job_within_seconds(here: Path) -> None:
    with started(LAUNCHERS["train"], here) as run:
        for _ in range(2):
            wait_until(lambda: latest(here / "run" / "checkpoints"), within_s=100)
            first = run.rank(0)
            kill(run, 1)
            killed_s = time.monotonic()
            wait_until(lambda: first not in run.pids(), within_s=10)
            before = updates(here)
            wait_until(
                lambda: run.process.poll() is not None or updates(here) != before, within_s=60
            )
        status, _, err = run.end(within_s=10)
    assert time.monotonic() - killed_s < 70
    assert status == 137
    assert err.count("was killed by SIGKILL") == 2
    assert err.count("all ranks are started anew, time 1") == 1


def test_a_mistake_is_not_tried_again(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "notes").write_text("mine")
    with started(LAUNCHERS["launch"], here) as run:
        status, _, err = run.end()
    assert (status, err.count("never overwritten")) == (2, 1)
    assert "anew" not in err


def test_two_nodes_of_torchrun_go_on_when_a_rank_of_one_is_killed(here: Path, whole: Path) -> None:
    """Each agent counts its own restarts, and only one of them has seen its rank die."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    node = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    node += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    node += ["--local-addr=127.0.0.1", "-m", "npu_pipe", *TRAIN]
    with started(node, here) as first, started(node, here) as second:
        wait_until(lambda: latest(here / "run" / "checkpoints"), within_s=100)
        pids = {**first.pids(), **second.pids()}
        victim = next(pid for pid, environ in pids.items() if environ.get("RANK") == "1")
        os.kill(victim, signal.SIGKILL)
        ends = [each.end() for each in (first, second)]
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert_same(here / "run", whole)
