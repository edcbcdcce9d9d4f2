"""npu-pipe verify CONFIG [flags]: compare a job's pipeline with the unsplit model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npu_pipe.cli.job_command import JobCommand, run_on_ranks
from npu_pipe.errors import RunError
from npu_pipe.launch.world import World
from npu_pipe.train.job import check_job

__all__ = ["VerifyCommand", "run"]


@dataclass(frozen=True, slots=True)
class VerifyCommand(JobCommand):
    """Compare the job's pipeline with the unsplit model: logits, loss, gradients, updates."""


def run(args: Sequence[str]) -> int:
    """Run the verb: status 0 if all comparisons hold, 1 if one does not."""
    return run_on_ranks(
        VerifyCommand,
        args,
        verb="verify",
        check=lambda command: check_job(command.job),
        work=_work,
        ranks=lambda command: command.job.pipeline.ranks * command.job.mesh.tp,
    )


def _work(command: VerifyCommand, world: World) -> int:
    # torch takes seconds to import, which only the ranks should wait for.
    from npu_pipe.train.verify import verify

    if not verify(command.job, world):
        raise RunError(
            "a pipeline computes what the unsplit model computes",
            "the table above marks where this one differs",
            "where a stage is wrong, gradients of the stages before it are too: start at the last",
        )
    return 0
