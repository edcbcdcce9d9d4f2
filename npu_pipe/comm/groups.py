"""The process groups of a pipeline: one a lane, and one for control.

They are made in one fixed order on every rank. Gloo connects all pairs when a group is made,
so nothing is set up lazily later, while ranks are busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from npu_pipe.comm.failure import peer_failures
from npu_pipe.comm.meeting import meet_at
from npu_pipe.errors import ConfigError, RunError
from npu_pipe.ir.program import Lane

__all__ = ["Groups"]

_NEVER = timedelta(days=365)  # who waits too long is for the watch to judge
_UNUSED_TAG = 1 << 30


class Groups:
    """The one owner of a pipeline's groups: whoever uses them asks here each time.

    A gloo connection closes when its last owner lets go of it, and that is how the other ranks
    notice that this one has left: see `close`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        members: Sequence[int] | None = None,
        lanes: Iterable[Lane] = Lane,
    ) -> None:
        """members: the ranks of torch.distributed that these are; None for all of them. lanes: that
        they have, beside control."""
        self.rank = rank
        self.size = size
        self._members = members
        self._wanted = tuple(lanes)
        self._control: dist.ProcessGroup | None = None
        self._lanes: dict[Lane, dist.ProcessGroup] = {}

    @property
    def is_open(self) -> bool:
        return self._control is not None

    @property
    def control(self) -> dist.ProcessGroup:
        if self._control is None:
            raise _closed()
        return self._control

    def lane(self, lane: Lane) -> dist.ProcessGroup:
        if lane not in self._lanes:
            raise _closed()
        return self._lanes[lane]

    def open(self, open_store: Callable[[], dist.Store], *, connect_s: float) -> None:
        """Connect all ranks; raises PeerError when one does not come within `connect_s`.

        The first pipeline of a process initialises torch.distributed, unless its user has, and
        leaves it so: the store at which the ranks met is served by rank 0, and can be served only
        once. Raises ConfigError where it is initialised with other ranks.
        """
        timeout = timedelta(seconds=connect_s)
        rank, size = self.rank, self.size
        with peer_failures(f"rank {rank} was connecting to {size} ranks"):
            if not dist.is_initialized():
                dist.init_process_group(
                    "gloo", store=open_store(), rank=rank, world_size=size, timeout=timeout
                )
            else:
                where = "the store of torch.distributed"
                meet_at(self._store(), rank, size, place=where, connect_s=connect_s)
            opening = f"groups/{self._store().add(f'groups/{rank}', 1)}"
            self._control = self._new_group(f"{opening}/control", timeout)
            self._lanes = {
                lane: self._new_group(f"{opening}/{lane.name}", timeout) for lane in self._wanted
            }

    def _new_group(self, name: str, timeout: timedelta) -> dist.ProcessGroup:
        """One that torch.distributed does not know of: a name of its making would need all of its
        ranks, or the same number of groups on each."""
        store = dist.PrefixStore(name, self._store())
        group = dist.ProcessGroup(store, self.rank, self.size)
        gloo = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group

    def _store(self) -> dist.Store:
        """Where these ranks meet, of those that torch.distributed has been initialised with."""
        store: dist.Store = dist.distributed_c10d._get_default_store()
        members = self._members or range(dist.get_world_size())
        if len(members) != self.size or members[self.rank] != dist.get_rank():
            raise ConfigError(
                "the pipeline has the ranks of torch.distributed",
                f"this is rank {self.rank} of {self.size}, and was initialised as rank "
                f"{dist.get_rank()} of {dist.get_world_size()}",
                "take the world from the same environment",
            )
        return dist.PrefixStore(f"npu_pipe of {','.join(map(str, members))}", store)

    def wait_for_ever(self) -> None:
        """From now on somebody watches: no wait of the groups ends by itself."""
        for group in self._all():
            group._get_backend(torch.device("cpu"))._set_default_timeout(_NEVER)

    def interrupt(self) -> None:
        """Have all that waits for a transfer, in any thread, raise. The groups are of no use then.

        Gloo closes all connections of a group when a transfer times out, and only then:
        `abort` wakes nobody.
        """
        for group in self._all():
            for peer in set(range(self.size)) - {self.rank}:
                with suppress(RuntimeError):
                    never = group.recv([torch.zeros(1, device="cpu")], peer, _UNUSED_TAG)
                    never.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Leave, without waiting for other ranks."""
        self._lanes.clear()
        self._control = None

    def _all(self) -> list[dist.ProcessGroup]:
        return [*self._lanes.values(), *([self._control] if self._control else [])]


def _closed() -> RunError:
    return RunError(
        "a pipeline is not used after it failed or was closed",
        "one of its transfers was asked for",
        "make a new one, or reset it",
    )
