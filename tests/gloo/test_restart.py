"""A run whose rank is killed goes on by itself, and ends as one that was never interrupted."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from started import NPU_PIPE, TORCHRUN, Started, started, wait_until
from test_resume import without_times
from test_train_command import SMALL

from npu_pipe.train.manifest import latest, read_manifest

pytestmark = pytest.mark.timeout(600)

STEPS = 40
# It takes two or three seconds, and on a machine that is busy with other things longer.
LEFT_S = 45
FLAGS = ["--run.steps", str(STEPS), "--run.checkpoint-every", "10", "--run.measure-every", "1000"]
TRAIN = ["train", "job.toml", *FLAGS]
LAUNCHERS = {
    "train": [*NPU_PIPE, *TRAIN, "--max-restarts", "1"],
    "launch": [*NPU_PIPE, "launch", "--nproc", "2", "--max-restarts", "1", *TRAIN],
    "torchrun": [
        *[*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"],
        *["-m", "npu_pipe", *TRAIN],
    ],
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


def kill_rank(rank: int, *nodes: Started) -> None:
    (node,) = (each for each in nodes if rank in each.ranks())
    kill(node, rank)


@contextmanager
def two_nodes(folder: Path, *, restarts: int, steps: int = STEPS) -> Iterator[list[Started]]:
    """Two agents of torchrun, with a rank each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    node = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", f"--max-restarts={restarts}"]
    node += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    node += ["--local-addr=127.0.0.1", "-m", "npu_pipe", *TRAIN, "--run.steps", str(steps)]
    with started(node, folder) as first, started(node, folder) as second:
        yield [first, second]


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
        wait_until(lambda: latest(here / "run" / "checkpoints"), within_s=240)
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
        wait_until(lambda: updates(here), within_s=240)
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
        wait_until(lambda: updates(here), within_s=240)
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
        wait_until(lambda: latest(here / "run" / "checkpoints"), within_s=240)
        first, log = run.rank(0), (here / "run" / "metrics.jsonl").stat().st_mtime_ns
        kill(run, 1)
        wait_until(lambda: first not in run.pids(), within_s=LEFT_S)
        again = here / "run" / "metrics.jsonl"
        wait_until(lambda: again.stat().st_mtime_ns > log and run.ranks() == {0, 1}, within_s=60)
        kill(run, 1)
        status, _, err = run.end(within_s=LEFT_S)
    assert status == 137
    assert err.count("was killed by SIGKILL") == 2
    assert err.count("all ranks are started anew, time 1") == 1


@pytest.mark.parametrize("launcher", ["train", "torchrun"])
def test_all_ranks_of_all_replicas_leave_within_seconds(here: Path, launcher: str) -> None:
    flags = ["--mesh.dp", "2", "--pipeline.microbatches", "2", "--run.steps", "100000"]
    command = {
        "train": [*NPU_PIPE, *TRAIN, *flags],
        "torchrun": [
            *[*TORCHRUN, "--standalone", "--nproc-per-node=4", "-m", "npu_pipe"],
            *[*TRAIN, *flags],
        ],
    }[launcher]
    with started(command, here) as run:
        wait_until(lambda: updates(here) > 2, within_s=240)
        kill(run, 3)
        status, _, err = run.end(within_s=LEFT_S)
    assert status != 0
    assert "SIGKILL" in err


def test_two_nodes_end_within_seconds_where_nothing_is_started_anew(here: Path) -> None:
    with two_nodes(here, restarts=0, steps=100000) as (first, second):
        wait_until(lambda: updates(here) > 2, within_s=240)
        kill_rank(1, first, second)
        wait_until(lambda: not (first.ranks() | second.ranks()), within_s=LEFT_S)
        assert all(each.end(within_s=60)[0] != 0 for each in (first, second))


def test_a_mistake_is_not_tried_again(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "notes").write_text("mine")
    with started(LAUNCHERS["launch"], here) as run:
        status, _, err = run.end()
    assert (status, err.count("never overwritten")) == (2, 1)
    assert "anew" not in err


def test_two_nodes_of_torchrun_go_on_when_a_rank_of_one_is_killed(here: Path, whole: Path) -> None:
    """Each agent counts its own restarts, and only one of them has seen its rank die."""
    with two_nodes(here, restarts=2) as nodes:
        wait_until(lambda: latest(here / "run" / "checkpoints"), within_s=240)
        kill_rank(1, *nodes)
        ends = [each.end() for each in nodes]
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert_same(here / "run", whole)
