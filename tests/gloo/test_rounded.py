"""Training in bfloat16: float32 where it has to be, and the numbers of the unsplit model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from jobs import curve
from safetensors.torch import load_file
from test_resume import RUN, without_times

from npu_pipe.train.manifest import latest, read_manifest

Get = Callable[[int], Cluster]
pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    ("ranks", "schedule", "recompute"),
    [(2, "1f1b", False), (2, "1f1b", True), (2, "zb-h1", True), (4, "zb-v", False)],
)
def test_gradients_are_those_of_the_unsplit_model_but_for_the_order_of_sums(
    cluster: Get, ranks: int, schedule: str, recompute: bool
) -> None:
    """Each microbatch rounds alike, W apart or not; the sums over 4 of them are in float32."""
    answers = cluster(ranks).values("rounded.update", schedule=schedule, recompute=recompute)
    for answer in answers:
        assert answer["difference"] <= 4 * 2.0**-23
        assert answer["crossed"] in ([], ["torch.bfloat16"])
    assert any(answer["crossed"] for answer in answers)
    assert {answer["output"] for answer in answers} == {None, "torch.bfloat16"}


@pytest.mark.parametrize(
    ("ranks", "schedule", "tp"), [(2, "1f1b", 1), (4, "zb-v", 1), (4, "zb-v", 2)]
)
def test_an_honest_pipeline_is_verified(cluster: Get, ranks: int, schedule: str, tp: int) -> None:
    run = {"schedule": schedule, "tp": tp, "precision": "bfloat16"}
    assert cluster(ranks).values("verifying.honest", timeout_s=150, **run) == [True] * ranks


@pytest.mark.parametrize(("tp", "factor"), [(1, 1.02), (2, 1.25)])
def test_gradients_that_are_too_large_are_found(cluster: Get, tp: int, factor: float) -> None:
    """In bfloat16 alone; where ranks share layers, by more than rounding can explain."""
    answers = cluster(2 * tp).values("rounded.scaled", tp=tp, factor=factor)
    assert answers == [False] * (2 * tp)


def test_the_loss_falls_as_in_float32(cluster: Get, tmp_path: Path) -> None:
    """To within one rounding of a number of its size, update by update."""
    run = {"schedule": "zb-v", "steps": 20, "precision": "bfloat16"}
    ours = cluster(2).values("curve.pipeline", folder=str(tmp_path), timeout_s=150, **run)[0]
    wide = curve.unsplit(20)
    assert ours[-1][0] < ours[0][0] - 1
    assert ours != wide
    for (loss, _), (expected, _) in zip(ours, wide, strict=True):
        assert loss == pytest.approx(expected, rel=2.0**-8)


def test_ten_updates_of_shared_stages_stay_within_a_rounding(cluster: Get, tmp_path: Path) -> None:
    """tp 2 x pp 2, recomputed, against the unsplit model in bfloat16."""
    run = {"schedule": "1f1b", "tp": 2, "steps": 10, "recompute": True, "precision": "bfloat16"}
    ours = cluster(4).values(
        "curve.pipeline", folder=str(tmp_path), held_out=0.001, timeout_s=150, **run
    )[0]
    unsplit = curve.unsplit(10, held_out=0.001, precision="bfloat16")
    for (loss, _), (expected, _) in zip(ours, unsplit, strict=True):
        assert loss == pytest.approx(expected, rel=2.0**-8)


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 2)])
def test_a_resumed_run_ends_as_the_whole_one_from_a_checkpoint_in_float32(
    cluster: Get, ranks: int, tp: int, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run = {"schedule": "1f1b", "tp": tp, "precision": "bfloat16", "held_out": 0.01, **RUN}
    job = cluster(ranks)
    job.values("curve.pipeline", folder=str(whole), timeout_s=150, **run)
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step-000004")
    job.values("curve.pipeline", folder=str(broken), resume=True, timeout_s=150, **run)
    first, second = (latest(folder / "checkpoints") for folder in (whole, broken))
    assert first is not None
    assert second is not None
    assert read_manifest(first) == read_manifest(second), "every shard has the same bytes"
    assert without_times(whole) == without_times(broken)
    for path in first.glob("stage-*.safetensors"):
        assert {each.dtype for each in load_file(path).values()} == {torch.float32}


def test_a_checkpoint_of_the_other_precision_is_refused(cluster: Get, tmp_path: Path) -> None:
    run = {"schedule": "1f1b", "folder": str(tmp_path), **RUN, "steps": 1}
    cluster(2).values("curve.pipeline", **run)
    for answer in cluster(2).run("curve.pipeline", resume=True, precision="bfloat16", **run):
        assert answer.error == "CheckpointError"
        assert "model.precision was 'float32' and is 'bfloat16'" in answer.text
