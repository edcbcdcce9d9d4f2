"""The process that stays when a local launch is killed, and ends what it has started.

A rank that runs npu_pipe looks after itself; any other script does not. So beside the ranks runs
this file, by its path, for it starts in a few milliseconds: it waits until the launch is gone, and
then kills all that carries the launch's mark in its environment, grandchildren included.

    python -I -S keeper.py LIFELINE_FD MARK
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

__all__ = ["main"]

_PATIENCE_S = 5.0


def main(lifeline_fd: int, mark: bytes) -> None:
    """Returns when nothing is left, or what is left cannot be killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(lifeline_fd, 1)  # Nobody writes: this returns when the launch's end is closed.
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        found = list(_marked(mark))
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: bytes) -> Iterator[int]:
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/environ", "rb") as environ:
                    if mark in environ.read().split(b"\0"):
                        yield int(name)


if __name__ == "__main__":
    main(int(sys.argv[1]), os.fsencode(sys.argv[2]))
