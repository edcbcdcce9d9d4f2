"""Circle: who fails together.

    ranks 0 2   a pipeline            0 and 1 share their layers, and so do 2 and 3: when one of
    ranks 1 3   the one beside it     the four fails, none of the others comes to an end

Most pipelines are a circle by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from npu_pipe.comm.control import Control
from npu_pipe.comm.groups import Groups
from npu_pipe.errors import RunError

__all__ = ["Circle", "open_circle"]


class Circle:
    """One rank's place in it, from when its pipeline has connected until it breaks off.

    rank, size: 0 <= rank < size, in the order of the ranks of the job. pipeline: the numbers here
    of the ranks of its pipeline, in their order there. members: the ranks of the job that these
    are; None for all of them. shared: the numbers here of those that share layers, by stage.
    """

    def __init__(
        self,
        control: Control,
        *,
        pipeline: Sequence[int],
        members: Sequence[int] | None,
        shared: Sequence[Sequence[int]] = (),
        groups: Groups | None = None,
    ) -> None:
        """groups: of its own, where it is more than a pipeline."""
        self.rank = control.rank
        self.size = control.size
        self.gather = control.gather
        self.pipeline = pipeline
        self.members = members
        self.shared = shared
        self._groups = groups

    @property
    def is_wider(self) -> bool:
        """Whether there are pipelines beside this one."""
        return self._groups is not None

    def wait_for_ever(self) -> None:
        if self._groups is not None:
            self._groups.wait_for_ever()

    def interrupt(self) -> None:
        if self._groups is not None:
            self._groups.interrupt()

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()


def open_circle(control: Control, beside: Sequence[int], *, connect_s: float) -> Circle:
    """Connect a rank to all of its circle; collective among them.

    control: of its pipeline, which is connected. beside: the ranks of the job that share layers
    with this one, itself among them. Raises PeerError when one does not come.
    """
    mine = dist.get_rank()
    everybody = control.gather([mine, *beside])
    members = sorted({rank for each in everybody for rank in each})
    numbers = [[members.index(rank) for rank in each] for each in everybody]
    groups = Groups(members.index(mine), len(members), members=members, lanes=())
    groups.open(_unopened, connect_s=connect_s)
    return Circle(
        Control(groups),
        pipeline=[own for own, *_ in numbers],
        shared=[beside for _, *beside in numbers],
        members=None if len(members) == dist.get_world_size() else members,
        groups=groups,
    )


def _unopened() -> dist.Store:
    raise RunError(
        "ranks that share layers meet where torch.distributed has been initialised with all ranks",
        "it has not been",
        "call npu_pipe.launch.group.join first",
    )
