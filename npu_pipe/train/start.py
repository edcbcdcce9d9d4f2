"""Where a run starts: anew in a free folder, or after its latest checkpoint. Imports no torch.

                       folder is free    of this job, no checkpoint    has checkpoints of this job
    first start        anew              refused                       refused
    --resume           refused           anew                          after the latest
    restarted          anew              anew                          after the latest

A launcher that starts the ranks anew after one has died tells them so, and then the run goes on
by itself. What belongs to another job is refused each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from npu_pipe.errors import CheckpointError
from npu_pipe.train.data import Corpus, load_corpus
from npu_pipe.train.job import Job, check_job, identity, settings_of
from npu_pipe.train.manifest import (
    Manifest,
    latest,
    read_manifest,
    require_same,
    step_of,
)
from npu_pipe.train.run_folder import RunFolder
from npu_pipe.train.toml import read_toml

__all__ = ["ResumePoint", "Start", "check_start", "check_unchanged", "find_start"]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A complete checkpoint of this job."""

    checkpoint: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Start:
    """point: None to begin with the first update. begun: whether the folder may hold an earlier
    start of the run. why: for the user, if there is something to say."""

    point: ResumePoint | None
    begun: bool
    why: str | None

    @property
    def done(self) -> int:
        """Updates that need not be run."""
        return 0 if self.point is None else self.point.manifest.step


def find_start(job: Job, corpus: Corpus, *, resume: bool, restarts: int = 0) -> Start:
    """Where to start in the job's run folder, as the table above says.

    restarts: how often the launcher has started the ranks anew. Raises ConfigError for a folder
    that is not free, CheckpointError where there is nothing to go on from, or it belongs to
    another job.
    """
    folder = RunFolder(job.run.folder)
    if not (resume or restarts):
        folder.check_free()
        return Start(None, begun=False, why=None)
    again = f"started anew, time {restarts}: " if restarts else ""
    checkpoint = latest(folder.checkpoints)
    if checkpoint is not None:
        manifest = read_manifest(checkpoint)
        require_same(checkpoint, manifest.job, identity(job, corpus))
        point = ResumePoint(checkpoint, manifest)
        why = f"{again}going on after update {manifest.step}, from {checkpoint}"
        return Start(point, begun=True, why=why if restarts else None)
    if not folder.config.is_file():
        if not restarts:
            raise CheckpointError(
                "a run goes on in the folder of a run",
                f"{folder.path} holds none",
                "check run.folder, or start anew without --resume",
            )
        folder.check_free()
    else:
        require_same(folder.config, settings_of(read_toml(Job, folder.config)), settings_of(job))
    why = f"{again}there is no checkpoint yet in {folder.path}, beginning with update 1"
    return Start(None, begun=True, why=why)


def check_start(job: Job, *, resume: bool) -> None:
    """Refuse with a UsageError whatever can be known to be wrong before a process is started."""
    check_job(job)
    find_start(job, load_corpus(job.data), resume=resume)


def check_unchanged(folder: RunFolder, start: Start) -> None:
    """Raise UsageError if another run came first to a folder that is now held."""
    if not start.begun:
        folder.check_free()
        return
    newest = latest(folder.checkpoints)
    if (0 if newest is None else step_of(newest)) != start.done:
        raise CheckpointError(
            "one run at a time goes on in a run folder",
            f"{folder.checkpoints} has changed since it was read after update {start.done}",
            "start again with --resume",
        )
