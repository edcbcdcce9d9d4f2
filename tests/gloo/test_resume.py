"""A run that goes on from a checkpoint ends bit for bit as one that was never interrupted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster

from npu_pipe.train.manifest import latest, read_manifest
from npu_pipe.train.metrics import read_metrics

RUN = {"steps": 4, "checkpoint_every": 2, "validate_every": 2, "measure_every": 2}


def without_times(folder: Path) -> list[dict[str, float]]:
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] != "bubble"]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 2), ("interleaved-1f1b", 4), ("zb-v", 4), ("dualpipe", 2)]
)
def test_a_resumed_run_ends_as_the_whole_one(
    cluster: Callable[[int], Cluster], schedule: str, stages: int, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ranks = cluster(2)
    ranks.values("curve.pipeline", schedule=schedule, folder=str(whole), **RUN)
    # What a run leaves that was killed while it saved after update 4.
    shutil.copytree(whole, broken)
    newest = broken / "checkpoints" / "step-000004"
    (newest / "manifest.json").unlink()
    newest.rename(newest.with_name("step-000004.partial"))

    ranks.values("curve.pipeline", schedule=schedule, folder=str(broken), resume=True, **RUN)
    ends = [latest(folder / "checkpoints") for folder in (whole, broken)]
    assert [end.name for end in ends if end] == ["step-000004"] * 2
    first, second = (read_manifest(end) for end in ends if end)
    assert first == second, "every shard has the same bytes"
    assert len(first.shards) == 2 + stages
    assert without_times(whole) == without_times(broken)
    assert [line["step"] for line in without_times(whole)] == [1, 2, 2, 3, 4, 4]


@pytest.mark.timeout(120)
def test_a_finished_run_can_be_made_longer_and_has_nothing_to_do_otherwise(
    cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    run = {**RUN, "steps": 2}
    ranks, where = cluster(2), {"schedule": "gpipe", "folder": str(tmp_path)}
    assert len(ranks.values("curve.pipeline", **where, **run)[0]) == 2
    picture = (tmp_path / "timeline.svg").read_bytes()
    assert len(ranks.values("curve.pipeline", **where, **run, resume=True)[0]) == 2
    assert (tmp_path / "timeline.svg").read_bytes() == picture
    assert len(ranks.values("curve.pipeline", **where, **RUN, resume=True)[0]) == 4


@pytest.mark.timeout(120)
def test_the_checkpoint_of_another_job_is_refused_on_every_rank(
    cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    ranks, run = cluster(2), {**RUN, "steps": 1}
    ranks.values("curve.pipeline", schedule="gpipe", folder=str(tmp_path), **run)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    answers = ranks.run(
        "curve.pipeline", schedule="1f1b", folder=str(tmp_path), resume=True, seed=1, **run
    )
    for answer in answers:
        assert answer.error == "CheckpointError"
        assert "pipeline.schedule was 'gpipe' and is '1f1b'" in answer.text
        assert "run.seed was 0 and is 1" in answer.text
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.timeout(120)
def test_ranks_with_different_jobs_are_told_so(
    cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    answers = cluster(2).run("curve.disagreeing", folder=str(tmp_path / "run"))
    for answer in answers:
        assert answer.error == "HandshakeError"
        assert "optimizer.learning_rate" in answer.text
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(120)
def test_a_loss_that_is_not_finite_ends_the_run(
    cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    answers = cluster(2).run("curve.diverging", folder=str(tmp_path / "run"))
    for answer in answers:
        assert answer.error == "RunError"
        assert "a lower optimizer.learning_rate" in answer.text
