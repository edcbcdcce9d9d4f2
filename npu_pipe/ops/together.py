"""Pipelines whose layers are cut over the same ranks end together.

    ranks 0 2    one pipeline       rank 2 fails: 0 is told by the watch of their pipeline
    ranks 1 3    the other one      3 is in a product with 2, and 1 with 0: they would wait for ever

So a rank whose pipeline breaks off closes its connections within its layer too: who waits there
fails, and with it its own pipeline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from npu_pipe.comm.device_lanes import Connection, require_unbroken
from npu_pipe.comm.links import OpenLink
from npu_pipe.comm.team import Team
from npu_pipe.comm.team_link import TeamLink
from npu_pipe.device.choose import device_of
from npu_pipe.ops.ranks import Ranks

__all__ = ["ending_together"]

_UNUSED_TAG = 1 << 30


def ending_together(ranks: Ranks, link: Callable[..., TeamLink]) -> OpenLink:
    """The same link for a Pipeline, whose failure reaches the ranks of its layers.

    Pipeline(stages, ..., link=ending_together(ranks, link_for(modules, schedule=schedule)))

    After a failure the group of these ranks is of no use: the pipeline cannot be reset.
    """

    def open_link(team: Team, **options: Any) -> TeamLink:
        leave = partial(_leave, ranks)
        team.on_break(leave)
        team.on_interrupt(leave)
        opened = link(team, **options)
        return opened if ranks.place.type == "cpu" else cast(TeamLink, _Asking(opened, ranks))

    return open_link


class _Asking:
    """The same link; at the end of each window it asks the layers' communicator, too.

    On a device nobody waits in a transfer: a stream goes on after one that failed, with whatever
    lies in memory.
    """

    def __init__(self, link: TeamLink, ranks: Ranks) -> None:
        self._link = link
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def finish(self) -> None:
        self._link.finish()
        if self._ranks.word is not None:
            peer = (self._ranks.rank + 1) % self._ranks.size
            backend = device_of(self._ranks.place).backend
            require_unbroken([Connection(peer, self._ranks.word, backend)])


def _leave(ranks: Ranks) -> None:
    """Close this rank's connections; gloo closes all of a group when a transfer times out, and
    only then."""
    group = ranks.group
    if group is None:
        return
    ranks.left.set()
    with suppress(RuntimeError):
        never = group.recv([torch.zeros(1)], (ranks.rank + 1) % ranks.size, _UNUSED_TAG)
        never.wait(timedelta(milliseconds=1))
    if ranks.place.type != "cpu":  # which may wait for what is under way, so not here
        threading.Thread(target=_abort, args=(ranks, group), daemon=True).start()


def _abort(ranks: Ranks, group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):
        device_of(ranks.place).abort(group)
