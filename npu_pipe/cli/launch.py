"""npu-pipe launch [flags] SCRIPT ...: run a program on ranks of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import tyro

from npu_pipe.cli.common import parse_flags
from npu_pipe.cli.job_command import path_options
from npu_pipe.cli.local_flags import LocalFlags
from npu_pipe.errors import ConfigError, UsageError
from npu_pipe.launch.local import run_local

__all__ = ["LaunchFlags", "run"]

# Verbs that a rank can be asked to run.
_VERBS = ("train", "verify", "doctor")


@dataclass(frozen=True, slots=True)
class LaunchFlags:
    """Run a Python program once a rank: on cores of its own, with what it prints after its rank,
    and if one fails, all end, and the first error is shown once.

    npu-pipe launch --nproc 4 my_training.py --lr 0.1

    npu-pipe launch --nproc 4 --max-restarts 3 train configs/gpt_tiny.toml

    npu-pipe launch --nproc 2 -m my_package.training
    """

    nproc: int
    """Ranks to start."""
    first_only: bool = False
    """Show rank 0 alone, on the terminal itself, as train does."""
    local: Annotated[LocalFlags, tyro.conf.arg(name="")] = field(default_factory=LocalFlags)


def run(args: Sequence[str]) -> int:
    """The verb: the status of the first rank that failed, 0 if none did."""
    ours, program = _split(args)
    flags = parse_flags(LaunchFlags, ours, verb="launch")
    if not program:
        raise UsageError(
            "launch runs a program",
            "none was given",
            "npu-pipe launch --nproc 4 my_training.py, or: launch --nproc 4 train job.toml",
        )
    return run_local(
        _command(program),
        ranks=flags.nproc,
        job=flags.local.job(
            flags.nproc, prefixed=not flags.first_only, serves_itself=not _is_ours(program)
        ),
    )


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our flags, and from the first other word on the program with its own."""
    single = {
        f"--{each.name.replace('_', '-')}"
        for kind in (LaunchFlags, LocalFlags)
        for each in fields(kind)
        if each.type in (bool, "bool")
    } | {"-h", "--help"}
    at = 0
    while at < len(args):
        word = args[at]
        if word == "--":
            return list(args[:at]), list(args[at + 1 :])
        if not word.startswith("-") or word == "-m":
            break
        at += 1 if "=" in word or word.replace("_", "-") in single else 2
    return list(args[:at]), list(args[at:])


def _is_ours(program: Sequence[str]) -> bool:
    """Whether it is a verb of npu-pipe."""
    return program[0] in _VERBS and not Path(program[0]).exists()


def _command(program: Sequence[str]) -> list[str]:
    first, *rest = program
    if first == "-m":
        if not rest:
            raise UsageError("-m names a module", "none was given", "npu-pipe launch ... -m MODULE")
        return [sys.executable, "-m", *rest]
    if _is_ours(program):
        return [sys.executable, *path_options(), "-m", "npu_pipe", *program]
    if not Path(first).is_file():
        raise ConfigError(
            f"launch runs a Python file, -m MODULE, or {', '.join(_VERBS)} of npu-pipe",
            f"there is no file {first}",
            "check the path",
        )
    return [sys.executable, "-u", first, *rest]
