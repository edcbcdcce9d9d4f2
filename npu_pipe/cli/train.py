"""npu-pipe train CONFIG [--resume] [flags]: train a job, on ranks of this machine or torchrun's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npu_pipe.cli.job_command import JobCommand, run_on_ranks
from npu_pipe.launch.world import World
from npu_pipe.train.start import check_start

__all__ = ["TrainCommand", "run"]


@dataclass(frozen=True, slots=True)
class TrainCommand(JobCommand):
    """Train a job. Settings come from CONFIG; flags override them."""

    resume: bool = False
    """Go on from the latest checkpoint in run.folder."""


def run(args: Sequence[str]) -> int:
    """Run the verb; returns the exit status."""
    return run_on_ranks(
        TrainCommand,
        args,
        verb="train",
        check=lambda command: check_start(command.job, resume=command.resume),
        work=_work,
    )


def _work(command: TrainCommand, world: World) -> int:
    # torch takes seconds to import, which only the ranks should wait for.
    from npu_pipe.train.trainer import train

    train(command.job, world, resume=command.resume)
    return 0
