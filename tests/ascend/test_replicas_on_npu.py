"""Replicas whose gradients travel over HCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
from ascend_cluster import environment
from test_train_on_npu import TINY, losses, train

FLAGS = (*TINY, "--run.steps", "3", "--pipeline.ranks", "1", "--run.validate-every", "99")


@pytest.mark.timeout(900)
def test_two_replicas_train_with_the_losses_of_one_pipeline(
    emulator: tuple[Path, Path], tmp_path: Path
) -> None:
    variables = environment(*emulator, {})
    replicas = ("--mesh.dp", "2", "--pipeline.microbatches", "2")
    alone = train(tmp_path / "one", *FLAGS, "--device", "cpu")
    done = train(tmp_path / "two", *FLAGS, *replicas, "--device", "npu", **variables)
    for each in (alone, done):
        assert each.returncode == 0, each.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
