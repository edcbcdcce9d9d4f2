"""Ranks: those that share every layer among them, as one of them sees them."""

from __future__ import annotations

import hashlib
import platform
import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from npu_pipe.comm.board import Board
from npu_pipe.errors import ConfigError

__all__ = ["Ranks", "ranks_of"]


@dataclass(slots=True, kw_only=True, eq=False)
class Ranks:
    """One process's view of a tensor-parallel group, which a pipeline may renew: see `together`.

    group: of torch.distributed, for tensors in `place`; None for a single rank.
    rank, size: 0 <= rank < size, in the group. hosts: how many machines they are on.
    chip: the name of the device, as its driver gives it; "" for a CPU.
    word: on a device, a transfer of theirs that has ended: it can be asked whether their
        communicator has failed.
    board: where to note that this rank waits for the others, while a pipeline has them.
    left: set when this rank has broken off; a transfer after that would connect anew, and wait.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    place: torch.device
    hosts: int = 1
    chip: str = ""
    word: dist.Work | None = None
    board: Board | None = field(default=None, repr=False)
    left: threading.Event = field(default_factory=threading.Event, repr=False)

    @classmethod
    def single(cls, place: torch.device) -> Ranks:
        return cls(group=None, rank=0, size=1, place=place)


def ranks_of(group: dist.ProcessGroup, place: torch.device) -> Ranks:
    """Collective: the ranks of a group tell each other which machine they are on.

    group: one that torch.distributed has made (`new_group`), with a backend for `place`.
    Raises ConfigError where this process is not in it.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError(
            "layers are shared by the ranks of the group that they are given",
            f"rank {dist.get_rank()} is not one of {dist.get_process_group_ranks(group)}",
            "give each rank the tensor-parallel group that it is in",
        )
    host = torch.tensor([_host()], device=place)
    found = [torch.empty_like(host) for _ in range(group.size())]
    word = dist.all_gather(found, host, group=group, async_op=True)
    assert word is not None
    word.wait()
    return Ranks(
        group=group,
        rank=rank,
        size=group.size(),
        place=place,
        hosts=len({int(each) for each in found}),
        chip=_chip(place),
        word=None if place.type == "cpu" else word,
    )


def _host() -> int:
    """A number for this machine; as small as an int64 has to be."""
    digest = hashlib.sha256(platform.node().encode()).digest()
    return int.from_bytes(digest[:7], "little")


def _chip(place: torch.device) -> str:
    if place.type == "cpu":
        return ""
    name: str = torch.get_device_module(place.type).get_device_name(place)
    return name
