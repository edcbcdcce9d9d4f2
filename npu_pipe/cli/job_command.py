"""What the verbs that run a job share: the job file with flags over it, and starting its ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from npu_pipe.cli.common import parse_flags
from npu_pipe.cli.local_flags import LocalFlags
from npu_pipe.errors import ConfigError
from npu_pipe.launch.guard import guard
from npu_pipe.launch.local import run_local
from npu_pipe.launch.world import Launcher, World
from npu_pipe.train.job import Job
from npu_pipe.train.toml import read_toml

__all__ = ["JobCommand", "path_options", "read_command", "run_on_ranks"]


@dataclass(frozen=True, slots=True)
class JobCommand:
    """Settings come from CONFIG; flags override them."""

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG")]
    """The job's TOML file."""
    job: Annotated[Job, tyro.conf.arg(name="")] = field(default_factory=Job)
    device: str | None = None
    """Kind of device to compute on; short for --run.device."""
    local: Annotated[LocalFlags, tyro.conf.arg(name="")] = field(default_factory=LocalFlags)


Command = TypeVar("Command", bound=JobCommand)


def read_command(kind: type[Command], args: Sequence[str], *, verb: str) -> Command:
    """The command line and its job file, by one parser: first for CONFIG, then over its values.

    Raises ConfigError for a job file that is wrong; ends with status 2 for a flag that is.
    """

    def parse(default: Command) -> Command:
        return parse_flags(kind, args, verb=verb, default=default)

    config = parse(kind(config=tyro.MISSING)).config
    command = parse(replace(kind(config=config), job=read_toml(Job, config)))
    if command.device is None:
        return command
    job = replace(command.job, run=replace(command.job.run, device=command.device))
    return replace(command, job=job)


def run_on_ranks(
    kind: type[Command],
    args: Sequence[str],
    *,
    verb: str,
    check: Callable[[Command], None],
    work: Callable[[Command, World], int],
    ranks: Callable[[Command], int],
) -> int:
    """Run a verb on the ranks of its job; returns the exit status. ranks: how many.

    Without a launcher this process runs `check`, which needs no torch, and starts the ranks;
    each of them comes here again as one rank, to `work`. Raises UsageError before anything has
    started: also for a kind of device that was asked for and cannot be used.
    """
    world = World.from_environment()
    if world.launcher is Launcher.ONE_PROCESS:
        command = read_command(kind, args, verb=verb)
        check(command)
        _require_device(command.job.run.device)
        return run_local(
            [sys.executable, *path_options(), "-m", "npu_pipe", verb, *args],
            ranks=ranks(command),
            job=command.local.job(ranks(command)),
        )
    with guard(world):
        return work(read_command(kind, args, verb=verb), world)


def _require_device(kind: str) -> None:
    if kind not in ("auto", "cpu"):  # which need no look, and so no torch
        from npu_pipe.device.choose import require_usable

        require_usable(kind)


def path_options() -> list[str]:
    """Keep a queue.py in the user's folder from standing in for Python's: `-m` looks there first.

    Raises ConfigError where that folder is gone, which torch would end the ranks for.
    """
    try:
        here = Path.cwd()
    except OSError as error:
        raise ConfigError(
            "a command runs in a folder that is there",
            f"the current folder: {error.strerror}",
            "change to another one",
        ) from error
    # Unless it is where this process too has the package from.
    return [] if {"", str(here)} & set(sys.path) else ["-P"]
