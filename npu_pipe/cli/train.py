"""npu-pipe train CONFIG [--resume] [flags]: train a job, on ranks of this machine or torchrun's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from npu_pipe.cli.dry_run_text import lines
from npu_pipe.cli.job_command import JobCommand, read_command, run_on_ranks
from npu_pipe.errors import ConfigError, UsageError
from npu_pipe.launch.world import World
from npu_pipe.train.data import load_corpus
from npu_pipe.train.dry_run import check_fits, dry_run
from npu_pipe.train.job import check_job, mesh_of
from npu_pipe.train.start import check_start, find_start

__all__ = ["TrainCommand", "run"]


@dataclass(frozen=True, slots=True)
class TrainCommand(JobCommand):
    """Train a job. Settings come from CONFIG; flags override them."""

    resume: bool = False
    """Go on from the latest checkpoint in run.folder."""
    dry_run: bool = False
    """Start nothing: check the job, and say what it would take. Status 2 if it does not fit."""


def run(args: Sequence[str]) -> int:
    """Run the verb; returns the exit status."""
    if "--dry-run" in [word.replace("_", "-") for word in args]:
        return _dry_run(read_command(TrainCommand, args, verb="train"))
    return run_on_ranks(
        TrainCommand,
        args,
        verb="train",
        check=lambda command: check_start(command.job, resume=command.resume),
        work=_work,
        ranks=lambda command: mesh_of(command.job).size,
    )


def _dry_run(command: TrainCommand) -> int:
    """Also as one of the ranks of a launcher, of which the first one tells."""
    check_job(command.job)
    corpus = load_corpus(command.job.data)
    found = dry_run(command.job)
    if _is_first():
        try:
            find_start(command.job, corpus, resume=command.resume)
        except UsageError as error:
            _would_not(error)
        for line in lines(found):
            print(line)
    check_fits(found)
    return 0


def _is_first() -> bool:
    """Also where nothing could be started: on a login node, or in a batch script without srun."""
    try:
        return World.from_environment().rank == 0
    except ConfigError as error:
        _would_not(error)
        return True


def _would_not(error: UsageError) -> None:
    print(f"npu-pipe: a dry run starts nothing; training would not, here: {error}", file=sys.stderr)


def _work(command: TrainCommand, world: World) -> int:
    # torch takes seconds to import, which only the ranks should wait for.
    from npu_pipe.train.trainer import train

    train(command.job, world, resume=command.resume)
    return 0
