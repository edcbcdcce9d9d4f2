"""Where a run starts: by what its folder holds, by --resume, and by what its launcher says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from npu_pipe.errors import CheckpointError, ConfigError
from npu_pipe.train.data import load_corpus
from npu_pipe.train.job import Job, identity
from npu_pipe.train.manifest import Manifest, commit, partial_path
from npu_pipe.train.optimizer import OptimizerConfig
from npu_pipe.train.run_folder import RunConfig, RunFolder
from npu_pipe.train.start import Start, check_start, check_unchanged, find_start
from npu_pipe.train.toml import to_toml


def free(job: Job) -> None:
    """Nothing has been written."""


def begun(job: Job) -> None:
    """A run that was killed before its first checkpoint was complete."""
    folder = RunFolder(job.run.folder)
    partial_path(folder.checkpoints, 2).mkdir(parents=True)
    folder.config.write_text(to_toml(job))
    folder.metrics.write_text('{"kind": "update", "step": 1}\n')


def saved(job: Job) -> None:
    """A run that was killed some time after update 2."""
    begun(job)
    commit(
        RunFolder(job.run.folder).checkpoints,
        Manifest(2, identity(job, load_corpus(job.data)), {}),
    )


def foreign(job: Job) -> None:
    """A folder with something that no run has written."""
    job.run.folder.mkdir()
    (job.run.folder / "notes.txt").write_text("mine")


REFUSED = -1


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return replace(Job(), run=RunConfig(folder=tmp_path / "run"))


@pytest.mark.parametrize(
    ("found", "first", "resumed", "restarted"),
    [
        (free, 0, REFUSED, 0),
        (begun, REFUSED, 0, 0),
        (saved, REFUSED, 2, 2),
        (foreign, REFUSED, REFUSED, REFUSED),
    ],
)
def test_the_table(
    job: Job, found: Callable[[Job], None], first: int, resumed: int, restarted: int
) -> None:
    found(job)
    corpus = load_corpus(job.data)

    def done(*, resume: bool, restarts: int = 0) -> int:
        try:
            start = find_start(job, corpus, resume=resume, restarts=restarts)
        except (CheckpointError, ConfigError):
            return REFUSED
        if not job.run.folder.exists() or found is not free:
            check_unchanged(RunFolder(job.run.folder), start)
        return start.done

    assert done(resume=False) == first
    assert done(resume=True) == resumed
    assert done(resume=False, restarts=1) == done(resume=True, restarts=3) or found is free
    assert done(resume=False, restarts=1) == restarted


def test_a_run_killed_before_its_first_checkpoint_is_not_sent_in_a_circle(job: Job) -> None:
    """The refusal says --resume, and --resume then does start it."""
    begun(job)
    with pytest.raises(ConfigError, match="go on with --resume"):
        check_start(job, resume=False)
    check_start(job, resume=True)
    start = find_start(job, load_corpus(job.data), resume=True)
    assert start.why is not None
    assert "there is no checkpoint yet" in start.why


def test_a_restart_says_so_and_from_where(job: Job) -> None:
    saved(job)
    start = find_start(job, load_corpus(job.data), resume=False, restarts=2)
    assert start.why is not None
    assert start.why.startswith("started anew, time 2: going on after update 2, from ")
    assert find_start(job, load_corpus(job.data), resume=True).why is None


def test_a_folder_without_a_run_is_not_gone_on_in(job: Job) -> None:
    with pytest.raises(CheckpointError, match="holds none"):
        check_start(job, resume=True)


@pytest.mark.parametrize("found", [begun, saved])
def test_what_another_job_has_begun_is_refused_with_what_differs(
    job: Job, found: Callable[[Job], None]
) -> None:
    found(job)
    other = replace(job, optimizer=OptimizerConfig(learning_rate=1.0))
    for resume, restarts in ((True, 0), (False, 1)):
        with pytest.raises(CheckpointError, match=r"optimizer.learning_rate was 0.003 and is 1.0"):
            find_start(other, load_corpus(job.data), resume=resume, restarts=restarts)
    longer = replace(job, run=replace(job.run, steps=7))
    assert find_start(longer, load_corpus(job.data), resume=True).begun


def test_a_run_that_another_one_has_overtaken_does_not_start(job: Job) -> None:
    corpus = load_corpus(job.data)
    anew, early = find_start(job, corpus, resume=False), Start(None, begun=True, why=None)
    saved(job)
    late = find_start(job, corpus, resume=True)
    folder = RunFolder(job.run.folder)
    check_unchanged(folder, late)
    with pytest.raises(CheckpointError, match="has changed since it was read after update 0"):
        check_unchanged(folder, early)
    with pytest.raises(ConfigError, match="never overwritten"):
        check_unchanged(folder, anew)
