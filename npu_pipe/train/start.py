"""Where a run starts: anew in a free folder, or after its latest checkpoint. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from npu_pipe.errors import CheckpointError
from npu_pipe.train.data import Corpus, load_corpus
from npu_pipe.train.job import Job, check_job, identity
from npu_pipe.train.manifest import Manifest, latest, read_manifest, require_same, step_of
from npu_pipe.train.run_folder import RunFolder

__all__ = ["ResumePoint", "check_start", "check_unchanged", "find_resume_point"]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A complete checkpoint of this job."""

    checkpoint: Path
    manifest: Manifest


def find_resume_point(job: Job, corpus: Corpus) -> ResumePoint:
    """The latest checkpoint in the job's run folder.

    Raises CheckpointError when there is none, or it belongs to another job.
    """
    folder = RunFolder(job.run.folder)
    checkpoint = latest(folder.checkpoints)
    if checkpoint is None:
        raise CheckpointError(
            "a run goes on from a complete checkpoint",
            f"{folder.checkpoints} holds none",
            "check run.folder, or start anew without --resume in another folder",
        )
    manifest = read_manifest(checkpoint)
    require_same(checkpoint, manifest, identity(job, corpus))
    return ResumePoint(checkpoint, manifest)


def check_start(job: Job, *, resume: bool) -> None:
    """Refuse with a UsageError whatever can be known to be wrong before a process is started."""
    check_job(job)
    if resume:
        find_resume_point(job, load_corpus(job.data))
    else:
        RunFolder(job.run.folder).check_free()


def check_unchanged(folder: RunFolder, done: int) -> None:
    """Raise UsageError if another run came first to a folder that is now held.

    done: the updates after which this run starts.
    """
    if done == 0:
        folder.check_free()
        return
    newest = latest(folder.checkpoints)
    if newest is None or step_of(newest) != done:
        raise CheckpointError(
            "one run at a time goes on in a run folder",
            f"{folder.checkpoints} has changed since update {done} was read from it",
            "start again with --resume",
        )
