"""A checkpoint counts only once it is complete, and only for the job it belongs to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npu_pipe.errors import CheckpointError
from npu_pipe.train.manifest import (
    Manifest,
    checkpoint_path,
    commit,
    describe_shard,
    latest,
    partial_path,
    prune,
    read_manifest,
    require_same,
    sweep,
    verify_shard,
)


def save(checkpoints: Path, step: int, content: bytes = b"weights") -> Manifest:
    partial = partial_path(checkpoints, step)
    partial.mkdir(parents=True)
    (partial / "stage-0").write_bytes(content)
    shards = {"stage-0": describe_shard(partial / "stage-0")}
    manifest = Manifest(step, {"model.dim": 64, "run.seed": 0}, shards)
    commit(checkpoints, manifest)
    return manifest


def test_a_committed_checkpoint_is_the_latest_and_reads_back(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    save(tmp_path, 9)
    written = save(tmp_path, 10)
    assert latest(tmp_path) == checkpoint_path(tmp_path, 10)
    assert read_manifest(tmp_path / "step-000010") == written


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    save(tmp_path, 999_999)
    save(tmp_path, 1_000_000)
    assert latest(tmp_path) == tmp_path / "step-1000000"


def test_what_a_killed_save_leaves_is_never_taken_and_is_swept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    partial_path(tmp_path, 2).mkdir()
    (tmp_path / "step-000003").mkdir()  # no manifest
    (tmp_path / "step-000000.old").mkdir()
    assert latest(tmp_path) == tmp_path / "step-000001"
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000010"]


def test_another_job_is_refused_with_every_key_that_differs(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1)
    require_same(tmp_path, manifest.job, {"run.seed": 0, "model.dim": 64})
    with pytest.raises(CheckpointError) as caught:
        require_same(tmp_path, manifest.job, {"model.dim": 32, "run.seed": 1})
    assert "model.dim was 64 and is 32, run.seed was 0 and is 1" in str(caught.value)


def test_a_shard_of_another_update_is_refused(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1)
    shard = tmp_path / "step-000001" / "stage-0"
    assert verify_shard(tmp_path / "step-000001", manifest, "stage-0") == shard
    shard.write_bytes(b"weighty")
    with pytest.raises(CheckpointError, match="is not the file that was saved"):
        verify_shard(tmp_path / "step-000001", manifest, "stage-0")
    shard.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        verify_shard(tmp_path / "step-000001", manifest, "stage-0")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format": "npu_pipe.checkpoint", "version": 2}),
        json.dumps({"format": "npu_pipe.checkpoint", "version": 1, "step": 1, "job": {}}),
        json.dumps(
            {"format": "npu_pipe.checkpoint", "version": 1, "step": 1, "job": {}, "shards": [1]}
        ),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="remove that checkpoint"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("step", ["2", "-1", "1e999", "NaN", '"1"', "null"])
def test_a_manifest_of_another_update_than_its_folder_is_refused(tmp_path: Path, step: str) -> None:
    save(tmp_path, 1)
    manifest = tmp_path / "step-000001" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 1', f'"step": {step}'))
    with pytest.raises(CheckpointError, match="it is of update"):
        read_manifest(manifest.parent)


def test_a_manifest_nested_beyond_measure_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-000001"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="recursion"):
        read_manifest(checkpoint)


def test_a_checkpoint_takes_the_place_of_one_without_a_manifest(tmp_path: Path) -> None:
    """Whoever takes the manifest away, to go on from the one before, comes by here again."""
    save(tmp_path, 1)
    (tmp_path / "step-000001" / "manifest.json").unlink()
    assert latest(tmp_path) is None
    save(tmp_path, 1, b"new")
    assert (tmp_path / "step-000001" / "stage-0").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_files_with_the_names_of_partial_checkpoints_are_swept_too(tmp_path: Path) -> None:
    (tmp_path / "step-000001.partial").write_text("")
    (tmp_path / "step-000002.old").symlink_to(tmp_path)
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())
