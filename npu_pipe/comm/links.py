"""Links: which way the transfers between the ranks of a pipeline take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from npu_pipe.comm.link import GlooLink
from npu_pipe.comm.pairs import connect_pairs
from npu_pipe.comm.shared import Pace, SharedLink
from npu_pipe.comm.team import Team
from npu_pipe.errors import ConfigError
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.executor import Link
from npu_pipe.runtime.record import Recorder

__all__ = ["OpenLink", "TeamLink", "fastest_link", "gloo_link", "paced", "poisoned"]


class TeamLink(Link, Protocol):
    """What the pipeline needs of a link, beside what the executor does."""

    def start_window(
        self, schedule: Schedule, signatures: Sequence[str], recorder: Recorder
    ) -> None:
        """Begin a window of this schedule; signatures: of the forms of each microbatch."""
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


OpenLink: TypeAlias = Callable[[Team], TeamLink]
"""Makes a link; called on all ranks of a team together."""


def fastest_link(team: Team, *, poison: bool = False) -> TeamLink:
    """Shared memory where all ranks are on one host, else the lanes' gloo groups."""
    pairs = connect_pairs(team.rank, team.size, gather=team.gather)
    if pairs is None:
        return gloo_link(team, poison=poison)
    link = SharedLink(team.rank, pairs, poison=poison)
    team.gather_through(link.gather)
    return link


def gloo_link(team: Team, *, poison: bool = False) -> TeamLink:
    """The lanes' gloo groups, wherever the ranks are."""
    return GlooLink(team.groups, control=team.control, poison=poison)


def paced(pace: Pace) -> OpenLink:
    """Shared memory, as slow as a wire of this pace. Raises ConfigError on several hosts."""

    def open_link(team: Team) -> TeamLink:
        pairs = connect_pairs(team.rank, team.size, gather=team.gather)
        if pairs is None:
            raise ConfigError(
                "a wire is made slower between the ranks of one host",
                f"the {team.size} ranks are on several",
                "start them on one, or use the network as it is",
            )
        return SharedLink(team.rank, pairs, pace=pace)

    return open_link


def poisoned(open_link: Callable[..., TeamLink] = fastest_link) -> OpenLink:
    """The same link, with its free buffers filled with NaN: who reads one is found out."""
    return partial(open_link, poison=True)
