"""Orphans: processes that a rank has started, and whose parents have ended.

The mark of a launch finds all that carry it, see `npu_pipe.launch.kept`. What was started with an
environment of its own, in a session of its own, carries none, and no process group tells of it.
But the kernel can make orphans children of this process, instead of process 1, and so it is found.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress

from npu_pipe.launch.proc import children

__all__ = ["Orphans"]

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_PATIENCE_S = 2.0


class Orphans:
    """Those of this process, from the making of this object to its `end`."""

    def __init__(self) -> None:
        self._others = children(os.getpid())
        _adopt(True)

    def reap(self, ranks: Collection[int]) -> None:
        """Let one go that has ended by itself: a long job may have many."""
        end = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None and end.si_pid not in {*ranks, *self._others}:
            os.waitpid(end.si_pid, 0)

    def end(self) -> None:
        """Kill them all, and theirs, which become ours by that; the ranks have ended."""
        until_s = time.monotonic() + _PATIENCE_S
        while (left := children(os.getpid()) - self._others) and time.monotonic() < until_s:
            for pid in left:
                with suppress(OSError):  # somebody else's, or gone
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        _adopt(False)


def _adopt(is_to: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_to), 0, 0, 0)
