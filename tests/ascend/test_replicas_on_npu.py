"""Replicas whose gradients travel over HCCL."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ascend_cluster import environment
from cluster import Cluster
from test_train_on_npu import TINY, losses, train

FLAGS = (*TINY, "--run.steps", "3", "--pipeline.ranks", "1", "--run.validate-every", "99")


@pytest.mark.timeout(900)
def test_two_replicas_train_with_the_losses_of_one_pipeline(
    emulator: tuple[Path, Path], tmp_path: Path
) -> None:
    variables = environment(*emulator, {"trace_dir": tmp_path})
    replicas = ("--mesh.dp", "2", "--pipeline.microbatches", "2")
    alone = train(tmp_path / "one", *FLAGS, "--device", "cpu")
    done = train(tmp_path / "two", *FLAGS, *replicas, "--device", "npu", **variables)
    for each in (alone, done):
        assert each.returncode == 0, each.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert "   0              1   400 MB  11 of 32\n" in done.stdout
    assert "one of its communicators is of dp ranks, with 2 x 200 MB\n" in done.stdout
    for rank in range(2):
        lines = (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()
        made = [each for each in map(json.loads, lines) if each["event"] == "init"]
        assert [each["buffer_mb"] for each in made] == [200], "what was told is what was made"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("op", "kind"),
    [("Broadcast", "async"), ("AlltoAll", "fail"), ("AlltoAll", "async"), ("AllGather", "fail")],
)
def test_an_error_of_hccl_between_replicas_is_an_error_on_each(
    npus: Callable[..., Cluster], op: str, kind: str
) -> None:
    """And never a sum of whatever lies in memory: no event tells of it. What HCCL returns
    (`fail`) is told once, in most runs to a part of torch_npu that keeps it to itself."""
    cluster = npus(2, fault=f"rank=1,kind={kind},op={op}")
    answers = cluster.values("replicas.adds", steps=2)
    cluster.kill()
    meanings = ["ERR02200", "a call into HCCL failed"]
    if kind == "fail":
        meanings += ["ERR00100", "work that was given to the NPU failed"]
    for found in answers:
        assert found["kind"] == "PeerError", found
        assert sum(each in found["text"] for each in meanings) == 2, found
        assert found["seconds"] < 10
