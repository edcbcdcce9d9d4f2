"""LocalRanks: the ranks of one start of a local launch, and all that they have started."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

from npu_pipe.launch.failure import Failure, first_failure
from npu_pipe.launch.orphans import Orphans
from npu_pipe.launch.output import PrefixedOutput
from npu_pipe.launch.process import RankProcess
from npu_pipe.launch.say import say

__all__ = ["LocalRanks"]

_POLL_S = 0.03
# A rank that lost its peer may be seen before the peer that failed.
_SETTLE_S = 1.0
_GRACE_S = 3.0


class LocalRanks:
    """From before its first rank starts until `end`; `caught` are the signals that came."""

    def __init__(self, caught: Sequence[signal.Signals]) -> None:
        self._caught = caught
        self._ranks: list[RankProcess] = []
        self._orphans = Orphans()
        self._output = PrefixedOutput([])

    def add(self, rank: RankProcess) -> None:
        """The next one; they are added in order."""
        self._ranks.append(rank)

    def watch(self, *, is_shown: bool) -> Failure | None:
        """Wait until all have ended, one has failed and the cause is known, or a signal has come.

        is_shown: print meanwhile what they write.
        """
        if is_shown:
            self._output = PrefixedOutput([rank.output for rank in self._ranks])
        settled_s = float("inf")
        while not self._caught:
            self._output.copy()
            self._orphans.reap([rank.pid for rank in self._ranks])
            failures = [found for rank in self._ranks if (found := rank.failure()) is not None]
            if failures:
                first = first_failure(failures)
                ended = self._ranks[first.rank].status() is not None
                settled_s = min(settled_s, time.monotonic() + _SETTLE_S)
                if (ended and not first.consequence) or time.monotonic() >= settled_s:
                    return first
            elif not self._running():
                return None
            time.sleep(_POLL_S)
        return None

    def stopped(self) -> list[int]:
        """The ranks that a signal or a debugger has stopped."""
        return [rank.rank for rank in self._ranks if rank.is_stopped()]

    def end(self) -> None:
        """SIGTERM, then SIGKILL after a grace, which a second Ctrl-C cuts short. Then nothing is
        left of it."""
        running = self._running()
        for rank in running:
            rank.send(signal.SIGTERM)
        until_s = time.monotonic() + _GRACE_S
        while time.monotonic() < until_s and len(self._caught) < 2 and self._running():
            self._output.copy()
            time.sleep(_POLL_S)
        for rank in self._ranks:
            rank.kill()
        self._orphans.end()
        self._output.finish(lambda: bool(self._caught))
        for rank in self._ranks:
            rank.close()
        if running and sys.stderr.isatty():
            # Rank 0 may have died inside a progress line, with the cursor hidden.
            say("\x1b[?25h")

    def _running(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.status() is None]
