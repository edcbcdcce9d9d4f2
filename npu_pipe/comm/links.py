"""Links: which way the transfers between the ranks of a pipeline take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from npu_pipe.comm.device_lanes import Streams, open_lanes
from npu_pipe.comm.device_link import DeviceLink
from npu_pipe.comm.device_pairs import Pair, pairs_used
from npu_pipe.comm.device_wait import DeviceWait
from npu_pipe.comm.handshake import agree, require_equal
from npu_pipe.comm.link import GlooLink
from npu_pipe.comm.pairs import connect_pairs
from npu_pipe.comm.shared import Pace, SharedLink
from npu_pipe.comm.staged import StagedLink
from npu_pipe.comm.team import Team
from npu_pipe.comm.team_link import TeamLink
from npu_pipe.device.choose import device_of
from npu_pipe.device.device import Device
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.errors import ConfigError
from npu_pipe.ir.schedule import Schedule
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
    "staged_link",
]

_DEFAULT = LaneOptions()


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
    modules: Collection[nn.Module],
    *,
    schedule: Schedule,
    tied: Sequence[Tied] = (),
    options: LaneOptions = _DEFAULT,
    check: Callable[[Device], None] | None = None,
) -> OpenLink:
    """The link between the devices that the ranks' modules are on; a rank whose modules have no
    parameters takes its own device of the others' kind. options: of the lanes on an accelerator.
    check: raises ConfigError, told on every rank, for an accelerator that they cannot be made on.

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
        place = next(iter(found), torch.device("cpu"))
        if check is not None and place.type != "cpu":
            check(device_of(place))
        return {"kind of device": place.type if found else None}

    def open_link(team: Team, *, poison: bool = False) -> TeamLink:
        found = agree("Pipeline", kind, gather=team.gather)
        require_equal(found, cure="move the modules of all ranks to devices of one kind")
        kinds = {each["kind of device"] for each in found} - {None, "cpu"}
        if not kinds:
            return fastest_link(team, poison=poison)
        place = next(iter(places()), torch.device(kinds.pop()))
        pairs = pairs_used(schedule, tied)
        return device_link(team, device_of(place), pairs, poison=poison, options=options)

    return open_link


def device_link(
    team: Team,
    device: Device,
    pairs: Iterable[Pair],
    *,
    poison: bool = False,
    options: LaneOptions = _DEFAULT,
) -> TeamLink:
    """The lanes' groups of the device's own backend, each with a stream for sends and one for
    receives."""
    device.select()
    wait = DeviceWait(device, team.board)
    team.on_interrupt(wait.interrupt)
    team.on_look(wait.look)
    with team.connecting():
        connections = open_lanes(team.groups, device, pairs, wait=wait, options=options)
    return DeviceLink(
        team,
        device,
        connections=connections,
        streams=Streams(device.stream),
        wait=wait,
        poison=poison,
    )


def staged_link(device: Device, *, schedule: Schedule) -> OpenLink:
    """Through the memory of the hosts: for ranks that share a device.

    Raises ConfigError for a schedule with two replicas, which exchange gradients on the lanes.
    """
    if schedule.mirrored:
        raise ConfigError(
            "ranks that share a device run schedules with one copy of each stage",
            f"{schedule.name} has two",
            "give each rank a device of its own, or take another schedule",
        )

    def open_link(team: Team, *, poison: bool = False) -> TeamLink:
        device.select()
        return StagedLink(fastest_link(team, poison=poison), device)

    return open_link


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
