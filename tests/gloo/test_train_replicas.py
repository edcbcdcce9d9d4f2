"""Training with data parallelism: the same losses, one checkpoint, and it goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import curve
from test_resume import RUN, without_times
from test_train_command import SMALL

from npu_pipe.train.manifest import latest, read_manifest
from npu_pipe.train.metrics import read_metrics

Ranks = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(("schedule", "dp"), [("1f1b", 2), ("zb-v", 2), ("gpipe", 4)])
def test_replicas_train_as_the_unsplit_model(
    cluster: Ranks, schedule: str, dp: int, tmp_path: Path
) -> None:
    run = {"schedule": schedule, "dp": dp, "steps": 5, "folder": str(tmp_path / "run")}
    ours = cluster(4).values("curve.pipeline", timeout_s=150, **run)[0]
    for (loss, norm), (expected, expected_norm) in zip(ours, curve.unsplit(5), strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-3)


def test_replicas_write_one_checkpoint_and_go_on_from_it(cluster: Ranks, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run = {**RUN, "schedule": "1f1b", "dp": 2}
    ranks = cluster(4)
    ranks.values("curve.pipeline", folder=str(whole), **run)
    ranks.values("curve.pipeline", folder=str(broken), **{**run, "steps": 2})
    ranks.values("curve.pipeline", folder=str(broken), resume=True, **run)
    ends = [latest(folder / "checkpoints") for folder in (whole, broken)]
    first, second = (read_manifest(end) for end in ends if end)
    assert first == second, "every shard has the same bytes"
    assert sorted(first.shards) == [
        *(f"rank-{rank}.safetensors" for rank in range(4)),
        *(f"stage-{stage}.safetensors" for stage in range(2)),
    ]
    assert without_times(whole) == without_times(broken)


def test_a_run_goes_on_with_as_many_replicas_as_it_was_begun_with(
    cluster: Ranks, tmp_path: Path
) -> None:
    run = {**RUN, "schedule": "gpipe", "folder": str(tmp_path), "steps": 2}
    cluster(2).values("curve.pipeline", **run)
    for answer in cluster(4).run("curve.pipeline", dp=2, resume=True, **run):
        assert answer.error == "CheckpointError"
        assert "mesh.dp was 1 and is 2" in answer.text


def train(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "npu_pipe", "train", "job.toml", *flags]
    return subprocess.run(
        line, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_starts_all_replicas(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(SMALL)
    flags = ("--mesh.dp", "2", "--pipeline.microbatches", "2")
    done = train(tmp_path, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    alone = train(tmp_path, "--run.folder", "alone")
    assert alone.returncode == 0, alone.stderr
    expected = read_metrics(tmp_path / "alone" / "metrics.jsonl")
    for kind in ("update", "validation"):
        ours, theirs = (
            [x["loss"] for x in each if x["kind"] == kind] for each in (lines, expected)
        )
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mesh.dp", "0"], "mesh.dp is from 1"),
        (["--mesh.dp", "3"], "does not divide by pipeline.microbatches 4 of mesh.dp 3 replicas"),
        (["--mesh.tp", "3"], "use model.heads = 3, or a mesh.tp that divides it"),
        (["--mesh.tp", "2", "--model.experts", "2"], "set mesh.tp = 1"),
    ],
)
def test_a_mesh_that_cannot_be_is_one_message(tmp_path: Path, flags: list[str], words: str) -> None:
    (tmp_path / "job.toml").write_text(SMALL)
    done = train(tmp_path, *flags)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr
