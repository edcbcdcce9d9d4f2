"""npu-pipe train CONFIG [--resume] [flags]: train a job, on ranks of this machine or torchrun's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from npu_pipe.cli.job_command import JobCommand, run_on_ranks
from npu_pipe.launch.world import World
from npu_pipe.train.job import Job
from npu_pipe.train.start import check_start

__all__ = ["TrainCommand", "run"]


@dataclass(frozen=True, slots=True)
class TrainCommand(JobCommand):
    """Train a job. Settings come from CONFIG; flags override them."""

    resume: bool = False
    """Go on from the latest checkpoint in run.folder."""
    device: str | None = None
    """Kind of device to compute on; short for --run.device."""


def run(args: Sequence[str]) -> int:
    """Run the verb; returns the exit status."""
    return run_on_ranks(
        TrainCommand,
        args,
        verb="train",
        check=lambda command: check_start(_job(command), resume=command.resume),
        work=_work,
    )


def _work(command: TrainCommand, world: World) -> int:
    # torch takes seconds to import, which only the ranks should wait for.
    from npu_pipe.train.trainer import train

    train(_job(command), world, resume=command.resume)
    return 0


def _job(command: TrainCommand) -> Job:
    if command.device is None:
        return command.job
    return replace(command.job, run=replace(command.job.run, device=command.device))
