"""Links: which way the transfers between the ranks of a pipeline take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from npu_pipe.comm.link import GlooLink
from npu_pipe.comm.pairs import connect_pairs
from npu_pipe.comm.shared import SharedLink
from npu_pipe.comm.team import Team
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.executor import Link
from npu_pipe.runtime.record import Recorder

__all__ = ["OpenLink", "TeamLink", "fastest_link", "gloo_link"]


class TeamLink(Link, Protocol):
    """What the pipeline needs of a link, beside what the executor does."""

    def start_window(
        self, schedule: Schedule, signatures: Sequence[str], recorder: Recorder
    ) -> None:
        """Begin a window of this schedule; signatures: of the forms of each microbatch."""
        ...

    def interrupt(self) -> None:
        """Have the main thread raise PeerError where it waits; called by another thread."""
        ...

    def forget(self) -> None:
        """Drop all transfers under way, after an error or at the end. It is not used again."""
        ...


OpenLink: TypeAlias = Callable[[Team], TeamLink]
"""Makes a link; called on all ranks of a team together."""


def fastest_link(team: Team) -> TeamLink:
    """Shared memory where all ranks are on one host, else the lanes' gloo groups."""
    pairs = connect_pairs(team.rank, team.size, gather=team.gather, patience_s=team.connect_s)
    if pairs is None:
        return gloo_link(team)
    link = SharedLink(team.rank, pairs)
    team.gather_through(link.gather)
    return link


def gloo_link(team: Team) -> TeamLink:
    """The lanes' gloo groups, wherever the ranks are."""
    return GlooLink(team.groups, control=team.control)
