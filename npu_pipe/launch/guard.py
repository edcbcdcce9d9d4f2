"""What a rank does for the process that started it: end with it, and tell it of an error."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from npu_pipe.launch.failure import failure_of, to_json
from npu_pipe.launch.world import Launcher, World

__all__ = ["guard", "report_failure"]


@contextmanager
def guard(world: World) -> Iterator[None]:
    """Run the body of a rank; the first thing a worker does, before its slow imports.

    An error in the body is reported once and becomes an exit status: 2 for a UsageError, 1 for
    anything else. Under a local launch the rank ends, with all it has started in its process
    group, as soon as the parent is gone.
    """
    if world.lifeline_fd is not None:
        threading.Thread(target=_end_with_parent, args=(world.lifeline_fd,), daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        raise SystemExit(report_failure(world, error)) from None


def report_failure(world: World, error: BaseException) -> int:
    """Tell the user, through the parent of a local launch, what has failed; returns the status.

    Rank 0 of a local launch shares the parent's terminal and so leaves the printing to it; other
    ranks print into their own log as well.
    """
    failure = failure_of(error, rank=world.rank)
    if world.report_fd is None or world.rank != 0:
        name = "" if world.launcher is Launcher.ONE_PROCESS else f"rank {world.rank}: "
        print(f"{name}{failure.text}", file=sys.stderr, flush=True)
    if world.report_fd is not None:
        os.pwrite(world.report_fd, to_json(failure), 0)
    return failure.status


def _end_with_parent(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)  # Nobody writes: this returns when the parent's end is closed.
    os.killpg(os.getpgrp(), signal.SIGKILL)
