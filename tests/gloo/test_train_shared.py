"""Training whose stages are shared by tensor-parallel ranks: the same losses, a part of each stage
in each file, and it goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import curve
from started import NPU_PIPE, started, wait_until
from test_restart import assert_same
from test_train_command import SMALL

from npu_pipe.train.manifest import latest, read_manifest
from npu_pipe.train.metrics import read_metrics

Ranks = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(200)
SHARED = [*NPU_PIPE, "train", "job.toml", "--mesh.tp", "2"]


def test_ten_updates_have_the_losses_and_norms_of_the_unsplit_model(
    cluster: Ranks, tmp_path: Path
) -> None:
    """Two ranks of two stages each; recomputed, with their transfers, under zb-v."""
    run = {"schedule": "zb-v", "tp": 2, "recompute": True, "steps": 10, "held_out": 0.001}
    ours = cluster(4).values("curve.pipeline", folder=str(tmp_path), timeout_s=150, **run)[0]
    unsplit = curve.unsplit(10, held_out=0.001)
    for (loss, norm), (expected, expected_norm) in zip(ours, unsplit, strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-3)


def test_each_rank_writes_its_part_and_another_number_of_them_is_refused(
    cluster: Ranks, tmp_path: Path
) -> None:
    run = {"schedule": "1f1b", "folder": str(tmp_path), "steps": 1, "held_out": 0.001}
    cluster(4).values("curve.pipeline", tp=2, timeout_s=150, **run)
    newest = latest(tmp_path / "checkpoints")
    assert newest is not None
    assert sorted(read_manifest(newest).shards) == [
        *(f"rank-{rank}.safetensors" for rank in range(4)),
        *(f"stage-{stage}.tp-{part}.safetensors" for stage in range(2) for part in range(2)),
    ]
    for answer in cluster(4).run("curve.pipeline", resume=True, timeout_s=150, **run):
        assert answer.error == "CheckpointError"
        assert "mesh.tp was 2 and is 1" in answer.text
        assert "use the job's own settings (config.toml in the run folder)" in answer.text


def test_a_run_whose_rank_is_killed_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """The message names the rank of the job, on whichever of the two pipelines it was."""
    flags = ["--run.steps", "40", "--run.checkpoint-every", "10", "--run.measure-every", "1000"]
    (tmp_path / "job.toml").write_text(SMALL)
    with started([*SHARED, *flags, "--max-restarts", "1"], tmp_path) as run:
        wait_until(lambda: latest(tmp_path / "run" / "checkpoints"), within_s=100)
        os.kill(run.rank(3), signal.SIGKILL)
        status, out, err = run.end()
    assert status == 0, err
    assert err.startswith("rank 3: ")
    lines = out.splitlines()
    at = lines.index("each stage is shared by 2 ranks; who does its products:")
    assert lines[at + 1].startswith("portable, not npu: it is for tensors on npu"), "told once"
    assert lines[at + 2].startswith("  all_gather_matmul (")
    assert lines[at + 2].endswith(" float32")
    assert "started anew, time 1: going on after update" in " ".join(out.split())
    with started([*SHARED, *flags, "--run.folder", "whole"], tmp_path) as run:
        assert run.end()[0] == 0
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_one_command_starts_dp_x_pp_x_tp_ranks(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(SMALL)
    flags = ["--mesh.pp", "2", "--mesh.dp", "2", "--pipeline.microbatches", "2"]
    losses = []
    for line, folder in (([*SHARED, *flags], "run"), (SHARED[:-2], "alone")):
        with started([*line, "--run.folder", folder], tmp_path) as run:
            status, _, err = run.end()
        assert (status, err) == (0, "")
        lines = read_metrics(tmp_path / folder / "metrics.jsonl")
        losses.append([each["loss"] for each in lines if "loss" in each])
    assert len(losses[0]) == 4, "three updates and a validation"
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
