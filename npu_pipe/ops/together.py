"""Together: what a pipeline does for the ranks that share its layers.

    ranks 0 2    one pipeline       2 and 3 share their layers. When 0 fails, 1 and 3 are told too:
    ranks 1 3    the one beside     all four are a circle. See `npu_pipe.comm.circle`.

Who waits for rows then has to be woken: each rank that is told closes its connections to those that
share its layers. On a device nobody waits in a transfer: a stream goes on after one that failed,
with whatever lies in memory; so their communicator is asked at the end of each window.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from npu_pipe.comm.board import Board
from npu_pipe.comm.device_lanes import Connection, require_unbroken
from npu_pipe.comm.failure import peer_failures
from npu_pipe.comm.team import Team
from npu_pipe.comm.team_link import TeamLink
from npu_pipe.device.choose import device_of
from npu_pipe.errors import RunError
from npu_pipe.ops.ranks import Ranks

__all__ = ["Together"]

_UNUSED_TAG = 1 << 30
_NEVER = timedelta(days=365)  # who waits too long is for the watch to judge


class Together:
    """The ranks of a pipeline's layers, from its making to its end."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._board: Board | None = None
        self._patience: timedelta | None = None  # of the group, where nobody watches

    @property
    def members(self) -> Sequence[int]:
        """Their ranks in the job; none of a single one."""
        group = self._ranks.group
        return () if group is None else dist.get_process_group_ranks(group)

    def join(self, team: Team) -> None:
        """From now on they fail with this team."""
        team.on_break(self._leave)
        team.on_interrupt(self._leave)

    def require_renewable(self) -> None:
        """Raise RunError on a device, whose communicator cannot be made anew: before a rank waits
        for others, which say the same."""
        ranks = self._ranks
        if ranks.place.type != "cpu":
            raise RunError(
                "layers that are cut over ranks are used until their communicator fails",
                f"that of rank {ranks.rank} of {ranks.size} has broken off, and what is compiled "
                f"and fused for {ranks.place.type} knows no other",
                "start the job anew, from its last checkpoint",
            )

    def opened(self, link: TeamLink, team: Team) -> TeamLink:
        """The link of a team that has connected, or has done so anew; collective among the ranks.

        Raises RunError as `require_renewable` where they have broken off.
        """
        ranks = self._ranks
        if ranks.left.is_set():
            self._renew(connect_s=team.connect_s)
        ranks.board = self._board = team.board
        if ranks.place.type != "cpu":
            return cast(TeamLink, _Asking(link, ranks))
        self._wait(_NEVER)
        return link

    def close(self) -> None:
        """The layers may be used on, and who waits in them waits no longer than before."""
        if self._ranks.board is self._board:
            self._ranks.board = None
        if self._patience is not None and not self._ranks.left.is_set():
            self._wait(self._patience)

    def _renew(self, *, connect_s: float) -> None:
        self.require_renewable()
        ranks = self._ranks
        with peer_failures(
            "rank {} of the {} that share a layer was connecting", ranks.rank, ranks.size
        ):
            ranks.group = dist.new_group(
                list(self.members),
                timeout=timedelta(seconds=connect_s),
                backend="gloo",
                use_local_synchronization=True,  # or all ranks would have to make all groups
            )
        ranks.left.clear()

    def _wait(self, patience: timedelta) -> None:
        if self._ranks.group is not None:
            backend = self._ranks.group._get_backend(torch.device("cpu"))
            if self._patience is None:
                self._patience = backend.options._timeout
            backend._set_default_timeout(patience)

    def _leave(self) -> None:
        """Close this rank's connections; gloo closes all of a group when a transfer times out, and
        only then."""
        ranks = self._ranks
        if ranks.group is None or ranks.left.is_set():
            return
        ranks.left.set()
        with suppress(RuntimeError):
            peer = (ranks.rank + 1) % ranks.size
            never = ranks.group.recv([torch.zeros(1, device="cpu")], peer, _UNUSED_TAG)
            never.wait(timedelta(milliseconds=1))
        if ranks.place.type != "cpu":  # which may wait for what is under way, so not here
            threading.Thread(target=_abort, args=(ranks, ranks.group), daemon=True).start()


class _Asking:
    """The same link, which asks the layers' communicator, too."""

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


def _abort(ranks: Ranks, group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):
        device_of(ranks.place).abort(group)
