"""Links: which way the transfers between the ranks of a pipeline take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import nn

from npu_pipe.comm.device_lanes import Pair, open_lanes, pairs_used
from npu_pipe.comm.device_link import DeviceLink, Streams
from npu_pipe.comm.device_wait import DeviceWait
from npu_pipe.comm.handshake import agree, require_equal
from npu_pipe.comm.link import GlooLink
from npu_pipe.comm.pairs import connect_pairs
from npu_pipe.comm.shared import Pace, SharedLink
from npu_pipe.comm.team import Team
from npu_pipe.device.choose import device_of
from npu_pipe.device.device import Device
from npu_pipe.errors import ConfigError
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.executor import Link
from npu_pipe.runtime.record import Recorder
from npu_pipe.runtime.tied import Tied

__all__ = [
    "OpenLink",
    "TeamLink",
    "device_link",
    "fastest_link",
    "gloo_link",
    "link_for",
    "paced",
    "poisoned",
]


class TeamLink(Link, Protocol):
    """What the pipeline needs of a link, beside what the executor does."""

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


def link_for(
    modules: Collection[nn.Module], *, schedule: Schedule, tied: Sequence[Tied] = ()
) -> OpenLink:
    """The link between the devices that the ranks' modules are on; a rank whose modules have no
    parameters takes its own device of the others' kind.

    Raises ConfigError, on every rank, where a rank's modules are on several devices, and
    HandshakeError where ranks have devices of several kinds.
    """

    def places() -> set[torch.device]:
        return {tensor.device for module in modules for tensor in module.parameters()}

    def kind() -> dict[str, str | None]:
        found = places()
        if len(found) > 1:
            raise ConfigError(
                "all stages of a rank are on one device",
                f"its parameters are on {', '.join(sorted(map(str, found)))}",
                "move its modules to one",
            )
        return {"kind of device": next((place.type for place in found), None)}

    def open_link(team: Team, *, poison: bool = False) -> TeamLink:
        found = agree("Pipeline", kind, gather=team.gather)
        require_equal(found, cure="move the modules of all ranks to devices of one kind")
        kinds = {each["kind of device"] for each in found} - {None, "cpu"}
        if not kinds:
            return fastest_link(team, poison=poison)
        place = next(iter(places()), torch.device(kinds.pop()))
        pairs = pairs_used(schedule, tied)
        return device_link(team, device_of(place), pairs, poison=poison)

    return open_link


def device_link(
    team: Team, device: Device, pairs: Iterable[Pair], *, poison: bool = False
) -> TeamLink:
    """The lanes' groups of the device's own backend, each with a stream for sends and one for
    receives."""
    device.select()
    wait = DeviceWait(device, team.board)
    with team.unbroken():
        open_lanes(team.groups, device, pairs, wait=wait)
    return DeviceLink(team, device, streams=Streams(device.stream), wait=wait, poison=poison)


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
