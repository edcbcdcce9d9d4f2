"""Boundaries in tiles: a pipeline whose transfers hide inside the products next to them.

    stages, link = tiled(stages, schedule=schedule, tiles=Measured(rows=4096))
    with Pipeline(stages, schedule=schedule, loss=loss, world=world, link=link) as pipe: ...

How many: see `npu_pipe_kernels.tile_choice`; or tiles=8, or {0: 8, 3: 4} by boundary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from npu_pipe.comm.handshake import agree, require_equal
from npu_pipe.comm.links import OpenLink, link_for
from npu_pipe.comm.port import Port
from npu_pipe.comm.team import Team
from npu_pipe.comm.team_link import TeamLink
from npu_pipe.comm.tiled_link import Ports, TiledLink
from npu_pipe.errors import ConfigError
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.tied import Tied
from npu_pipe_kernels.boundary_layer import (
    ends_of,
    require_no_hooks,
    with_ports,
)
from npu_pipe_kernels.tile_choice import Measured, measured_tiles

__all__ = ["Tiled", "tiled"]

_LOG = logging.getLogger(__name__)


class Tiled(NamedTuple):
    """For Pipeline: the stages to give it, and the link."""

    stages: dict[int, nn.Module]
    link: OpenLink


def tiled(
    stages: Mapping[int, nn.Module],
    *,
    schedule: Schedule,
    tiles: int | Mapping[int, int] | Measured,
    link: Callable[..., TeamLink] | None = None,
    tied: Sequence[Tied] = (),
) -> Tiled:
    """Have the values of boundaries travel in tiles of rows, where a linear layer is next to them.

    stages: this rank's, as Pipeline takes them. They share their parameters with those that are
        given back, by the same names.
    tiles: of each value at every such boundary; or by the stage before a boundary, for those that
        are named; or as many as will be best by what the link measures before it is used. With 1
        nothing changes.
    link: what the tiles travel on; None: as suits the modules' device. tied: as for Pipeline.
    Raises ConfigError for less than one tile, and for a boundary between stages of one rank. The
    link raises it, on every rank, where no linear layer is next to a boundary that was named, and
    HandshakeError where ranks were given other tiles.
    """
    wanted = _wanted(schedule, tiles)
    ends = {stage: ends_of(module) for stage, module in stages.items()}
    ports = {
        stage: Ports(
            Port() if before is not None and stage - 1 in wanted else None,
            Port() if after is not None and stage in wanted else None,
        )
        for stage, (before, after) in ends.items()
    }
    made = {
        stage: with_ports(module, before=ports[stage].before, after=ports[stage].after)
        for stage, module in stages.items()
    }
    inner: Callable[..., TeamLink] = link or link_for(made.values(), schedule=schedule, tied=tied)

    def look() -> None:
        for stage, (before, after) in ports.items():
            for module in (made[stage], stages[stage]):  # those of the given one would not be run
                require_no_hooks(stage, module, before=before is not None, after=after is not None)

    def open_link(team: Team, *, poison: bool = False) -> TeamLink:
        here = {
            "before": sorted(stage - 1 for stage, each in ports.items() if each.before),
            "after": sorted(stage for stage, each in ports.items() if each.after),
        }
        found = _agree(wanted, here, asked=tiles, team=team)
        opened = inner(team, poison=True) if poison else inner(team)
        if found and isinstance(tiles, Measured):
            team.on_interrupt(opened.interrupt)
            team.on_break(opened.forget)
            place = schedule.placement
            pairs = {boundary: (place[boundary], place[boundary + 1]) for boundary in found}
            found = measured_tiles(tiles, pairs, ends, team=team, link=opened)
        if team.rank == 0:
            _LOG.info("%s", _said(wanted, found))
        if not found:
            return opened
        return TiledLink(opened, team, tiles=found, ports=ports, look=look, poison=poison)

    return Tiled(made, open_link)


def _wanted(schedule: Schedule, tiles: int | Mapping[int, int] | Measured) -> dict[int, int]:
    """By boundary, where ranks meet; the most that there may be, where they are measured."""
    placement = schedule.placement
    far = {s for s in range(schedule.stages - 1) if placement[s] != placement[s + 1]}
    most = tiles.most if isinstance(tiles, Measured) else tiles
    wanted = dict.fromkeys(far, most) if isinstance(most, int) else dict(most)
    for boundary, count in wanted.items():
        if not isinstance(count, int) or count < 1:
            raise ConfigError(
                "a value crosses a boundary in 1 tile or more",
                f"{count!r} were asked for after stage {boundary}",
                "give a whole number from 1 on",
            )
        if boundary not in far:
            raise ConfigError(
                "tiles travel between two stages on different ranks",
                f"{schedule.name} has no such boundary after stage {boundary}",
                f"name the stage before one: {', '.join(map(str, sorted(far))) or 'there is none'}",
            )
    return {boundary: count for boundary, count in sorted(wanted.items()) if count > 1}


def _agree(
    wanted: Mapping[int, int],
    here: Mapping[str, Sequence[int]],
    *,
    asked: int | Mapping[int, int] | Measured,
    team: Team,
) -> dict[int, int]:
    """Of the boundaries, those that have a linear layer on one side at least."""

    def prepare() -> dict[str, Any]:
        told = str(asked) if isinstance(asked, Measured) else [[*each] for each in wanted.items()]
        return {"tiles": told, **here}

    answers = agree("Pipeline in tiles", prepare, gather=team.gather)
    require_equal(
        [{"tiles": answer["tiles"]} for answer in answers],
        cure="ask for the same tiles on every rank",
    )
    known = {
        boundary for answer in answers for side in ("before", "after") for boundary in answer[side]
    }
    for boundary in wanted:
        if isinstance(asked, Mapping) and boundary not in known:
            raise ConfigError(
                "a boundary is crossed in tiles where an nn.Linear is next to it, last or first of "
                "an nn.Sequential and without hooks",
                f"stage {boundary} does not end with one, and stage {boundary + 1} does not begin "
                "with one",
                "leave this boundary out of the tiles, or have the stage end with its product",
            )
    return {boundary: count for boundary, count in wanted.items() if boundary in known}


def _said(wanted: Mapping[int, int], found: Mapping[int, int]) -> str:
    parts = [f"after stage {boundary} in {count} tiles" for boundary, count in found.items()]
    parts += [
        f"after stage {boundary} in one piece: no linear layer is next to it"
        for boundary in wanted
        if boundary not in found
    ]
    return f"values cross {'; '.join(parts) or 'no boundary in tiles'}"
