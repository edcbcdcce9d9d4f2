"""TeamLink: what the pipeline needs of a link, beside what the executor does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.executor import Link
from npu_pipe.runtime.record import Recorder

__all__ = ["TeamLink"]


class TeamLink(Link, Protocol):
    """One rank's end of all transfers between the ranks of a pipeline."""

    def start_window(
        self, schedule: Schedule, signatures: Sequence[str], recorder: Recorder
    ) -> None:
        """Begin a window of this schedule; signatures: of the forms of each microbatch."""
        ...

    def recorder(self) -> Recorder:
        """A recorder for one window, by the clock of what computes."""
        ...

    @property
    def buffers(self) -> int:
        """How many it has made for messages that come in, or go out, at one time."""
        ...

    @property
    def in_use(self) -> int:
        """How many messages it has under way, or not been told to release."""
        ...

    def interrupt(self) -> None:
        """Have the main thread raise PeerError where it waits; called by another thread."""
        ...

    def forget(self) -> None:
        """Drop all transfers under way, after an error or at the end. It is not used again."""
        ...
