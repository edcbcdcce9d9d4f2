"""A rank does not outlive the process that started it, however that one ends.

Our own launch holds the other end of a pipe. A foreign launcher knows nothing of us, so its rank
looks after it: torchrun, msrun and mpirun that are killed with SIGKILL leave their ranks behind,
with the devices in their hands, and msrun does so on SIGTERM too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import TypeVarTuple

from npu_pipe.launch.proc import PROC, process_line
from npu_pipe.launch.say import say
from npu_pipe.launch.world import Launcher, World

__all__ = ["end_with_launcher"]

T = TypeVarTuple("T")

_FOLLOWED = {
    *(Launcher.TORCHRUN, Launcher.TORCH_NPU_RUN, Launcher.MSRUN),
    *(Launcher.OPEN_MPI, Launcher.MPICH, Launcher.SLURM),
}
_POLL_S = 0.5
_THREAD = "npu_pipe lifeline"


def end_with_launcher(world: World) -> None:
    """From now on, if the launcher dies, kill this process with all that it has started in its
    process group. Called early, and again by who does not know of that; once is enough.

    Not under an msrun without --join=True: it has left its ranks alone on purpose.
    """
    if world.lifeline_fd is not None:
        _in_thread(_end_with_parent, world.lifeline_fd)
    elif world.launcher in _FOLLOWED:
        pid = _first_outside(os.getpgrp())
        began = None if pid is None else _began(pid)
        if pid is not None and began is not None and not _leaves_ranks_alone(world, pid):
            _in_thread(_end_with, world, pid, began)


def _end_with_parent(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)  # Nobody writes: this returns when the parent's end is closed.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _end_with(world: World, pid: int, began: str) -> None:
    # No pidfd: kernels before 5.3 are still met on Ascend hosts.
    while _began(pid) == began:
        time.sleep(_POLL_S)
    say(f"rank {world.rank}: {world.launcher.value} is gone, and so is this rank")
    if world.launcher is Launcher.MSRUN:
        with suppress(OSError):
            _end_tails()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _first_outside(group: int) -> int | None:
    """The nearest ancestor that is not in this process group: every launcher gives each rank one
    of its own, and a wrapper script of the user's stays in it."""
    pid = os.getppid()
    while pid > 1:  # process 1 dies with its whole container
        line = process_line(pid)
        if line is None:
            return None
        if line.group != group:
            return pid
        pid = line.parent
    return None


def _leaves_ranks_alone(world: World, pid: int) -> bool:
    """Whether the launcher is an msrun without --join=True."""
    if world.launcher is not Launcher.MSRUN:
        return False
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return True  # it has ended while this process was starting
    for word, following in pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name in ("--j", "--jo", "--joi", "--join"):  # as argparse lets people shorten it
            return (value or following) != "True"
    return True


def _end_tails() -> None:
    """End each `tail -f` of a log of this node's ranks, which msrun would have done: those that
    lie where this rank's lies, and have been left to whom this rank has been left."""
    log = (PROC / "self" / "fd" / "1").resolve(strict=True)
    for folder in PROC.iterdir():
        with suppress(OSError, ValueError):
            program, *rest = (folder / "cmdline").read_text().rstrip("\0").split("\0")
            if not program.endswith("tail") or rest[:-1] != ["-f"]:
                continue
            line = process_line(int(folder.name))
            if line is None or line.parent != os.getppid():
                continue
            if os.path.samefile((folder / "cwd" / rest[-1]).parent, log.parent):
                os.kill(int(folder.name), signal.SIGKILL)


def _began(pid: int) -> str | None:
    """When the process began; None once it has ended."""
    line = process_line(pid)
    return None if line is None or line.is_dead else line.began


def _in_thread(function: Callable[[*T], None], *arguments: *T) -> None:
    if not any(thread.name == _THREAD for thread in threading.enumerate()):
        threading.Thread(target=function, args=arguments, name=_THREAD, daemon=True).start()
