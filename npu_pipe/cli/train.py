"""npu-pipe train CONFIG [--resume] [flags]: train a job, on ranks of this machine or torchrun's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from npu_pipe.launch.guard import guard
from npu_pipe.launch.local import run_local
from npu_pipe.launch.world import Launcher, World
from npu_pipe.train.job import Job
from npu_pipe.train.start import check_start
from npu_pipe.train.toml import read_toml

__all__ = ["TrainCommand", "parse", "run"]


@dataclass(frozen=True, slots=True)
class TrainCommand:
    """Train a job. Settings come from CONFIG; flags override them."""

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG")]
    """The job's TOML file."""
    job: Annotated[Job, tyro.conf.arg(name="")] = field(default_factory=Job)
    resume: bool = False
    """Go on from the latest checkpoint in run.folder."""
    port: int | None = None
    """Where the ranks of this machine meet; a free port if left out."""


def parse(args: Sequence[str]) -> TrainCommand:
    """The command line and its job file, by one parser: first for CONFIG, then over its values.

    Raises ConfigError for a job file that is wrong; ends with status 2 for a flag that is.
    """
    config = _parse(args, TrainCommand(config=tyro.MISSING)).config
    return _parse(args, TrainCommand(config=config, job=read_toml(Job, config)))


def run(args: Sequence[str]) -> int:
    """Run the verb; returns the exit status.

    Without a launcher this process checks the job, which needs no torch, and starts its ranks;
    each of them comes here again as one rank. Raises UsageError before anything has started.
    """
    world = World.from_environment()
    if world.launcher is Launcher.ONE_PROCESS:
        command = parse(args)
        check_start(command.job, resume=command.resume)
        ranks = command.job.pipeline.ranks
        return run_local(
            [sys.executable, "-m", "npu_pipe", "train", *args],
            ranks=ranks,
            port=command.port,
        )
    with guard(world):
        command = parse(args)
        # torch takes seconds to import, which only the ranks should wait for.
        from npu_pipe.train import trainer

        trainer.train(command.job, world, resume=command.resume)
    return 0


def _parse(args: Sequence[str], default: TrainCommand) -> TrainCommand:
    return tyro.cli(
        TrainCommand,
        prog="npu-pipe train",
        args=list(args),
        default=default,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
