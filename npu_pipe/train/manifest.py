"""Which checkpoints are complete, and what they hold. Imports no torch.

    checkpoints/
      step-000100/                 complete: it has its name only since every rank had finished
        manifest.json              step, job, and size and SHA-256 of every shard
        stage-0.safetensors        parameters and optimizer state of a stage; where mesh.tp ranks
                                   share it, stage-0.tp-0.safetensors and so on, one of each
        rank-0.safetensors         random state of a rank
      step-000200.partial/         being written, or left by a save that was killed

A save writes under the partial name; once all ranks have reported their shards, rank 0 writes
the manifest and renames the folder. Whatever happens before that leaves the earlier checkpoints
as they were. Ranks on several machines need the run folder on a file system that they share.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_pipe.errors import CheckpointError
from npu_pipe.train.job import Identity

__all__ = [
    "Manifest",
    "Shard",
    "checkpoint_path",
    "commit",
    "describe_shard",
    "latest",
    "partial_path",
    "prune",
    "read_manifest",
    "require_same",
    "step_of",
    "sweep",
    "verify_shard",
]

FORMAT, VERSION = "npu_pipe.checkpoint", 1
_FILE = "manifest.json"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class Shard:
    """Size and SHA-256 (hex) of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """step: updates done; job: see `npu_pipe.train.job.identity`; shards: by file name."""

    step: int
    job: Identity
    shards: Mapping[str, Shard]


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step stands once it is complete."""
    return checkpoints / f"step-{step:06d}"


def partial_path(checkpoints: Path, step: int) -> Path:
    """Where it is written."""
    return checkpoints / f"step-{step:06d}.partial"


def latest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint."""
    return max(_complete(checkpoints), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The updates that were done when it was saved, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def describe_shard(path: Path) -> Shard:
    """Bring a file to the disk and describe it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Shard(path.stat().st_size, digest)


def commit(checkpoints: Path, manifest: Manifest) -> None:
    """Complete the checkpoint of `manifest.step`, whose shards all stand under its partial name."""
    partial = partial_path(checkpoints, manifest.step)
    shards = {
        name: {"bytes": shard.bytes, "sha256": shard.sha256}
        for name, shard in sorted(manifest.shards.items())
    }
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "job": manifest.job,
        "shards": shards,
    }
    with (partial / _FILE).open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    complete = checkpoint_path(checkpoints, manifest.step)
    if complete.exists():  # only by name, or this step would not have been run again
        _remove(complete)
    partial.rename(complete)
    _sync_folder(checkpoints)


def prune(checkpoints: Path, *, keep: int) -> None:
    """Remove all but the newest complete checkpoints."""
    for old in sorted(_complete(checkpoints), key=step_of)[:-keep]:
        _remove(old)


def sweep(checkpoints: Path) -> None:
    """Remove what a killed save or prune has left. Raises CheckpointError where it cannot."""
    for left in (*checkpoints.glob("step-*.partial"), *checkpoints.glob("step-*.old")):
        try:
            _delete(left)
        except OSError as error:
            raise CheckpointError(
                "what a killed run has left is removed before the next one goes on",
                f"{error.filename or left}: {error.strerror}",
                "remove it by hand",
            ) from error


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises CheckpointError when it is not a manifest, or of another version."""
    try:
        data: Any = json.loads((checkpoint / _FILE).read_text(encoding="utf-8"))
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is {data['format']} version {data['version']}")
        if data["step"] != step_of(checkpoint):
            raise ValueError(f"it is of update {data['step']}")
        shards = {name: Shard(**shard) for name, shard in data["shards"].items()}
        return Manifest(step_of(checkpoint), dict(data["job"]), shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"a checkpoint has a {_FILE} of {FORMAT} version {VERSION}",
            f"{checkpoint / _FILE}: {error}",
            "remove that checkpoint to go on from the one before",
        ) from error


def require_same(path: Path, of: Identity, job: Identity) -> None:
    """Raise CheckpointError, naming what differs, unless what is at `path` belongs to this job.

    of: what decides the numbers of the run that it belongs to.
    """
    differing = [
        f"{key} was {of.get(key)!r} and is {job.get(key)!r}"
        for key in sorted(of.keys() | job.keys())
        if of.get(key) != job.get(key)
    ]
    if differing:
        raise CheckpointError(
            "a run goes on with the job that it was begun with",
            f"{path}: {', '.join(differing)}",
            "use the job's own settings (config.toml in the run folder), or start a new run "
            "in another folder",
        )


def verify_shard(checkpoint: Path, manifest: Manifest, name: str) -> Path:
    """The path of a shard. Raises CheckpointError unless it is the one the manifest tells of."""
    path = checkpoint / name
    try:
        found: Shard | str = describe_shard(path)
    except OSError as error:
        found = error.strerror or str(error)
    if found != manifest.shards.get(name):
        raise CheckpointError(
            "the shards of a checkpoint are all of the same update",
            f"{path} is not the file that was saved: {found}, {manifest.shards.get(name)} expected",
            "remove that checkpoint to go on from the one before",
        )
    return path


def _complete(checkpoints: Path) -> list[Path]:
    return [
        path
        for path in checkpoints.glob("step-*")
        if _NAME.fullmatch(path.name) and (path / _FILE).is_file()
    ]


def _remove(checkpoint: Path) -> None:
    gone = checkpoint.with_name(checkpoint.name + ".old")  # half of it is never taken for whole
    checkpoint.rename(gone)
    _delete(gone)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
