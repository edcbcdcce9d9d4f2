"""A process group whose wire has a latency and a bandwidth: gloo between ranks of one host.

A message comes with the time at which a wire of this pace would have brought it, and is not taken
earlier. The messages of one rank follow one another on its wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from npu_pipe.comm.shared import Pace
from npu_pipe.runtime.record import now_us

__all__ = ["paced_group"]

_STAMPS = 1 << 16  # tags of the times, apart from those of the messages


def paced_group(pace: Pace) -> dist.ProcessGroup:
    """A group of all ranks; collective, and once a process for a pace."""
    name = f"paced{int(pace.latency_us)}x{int(pace.bytes_per_us)}"

    def make(store: dist.Store, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
        return _Paced(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, pace)

    dist.Backend.register_backend(name, make, devices=["cpu"])
    group = dist.new_group(backend=name)
    assert isinstance(group, dist.ProcessGroup)
    return group


class _Work(dist._Work):
    """Done when all of `works` are, and then what `after` does."""

    def __init__(self, works: Sequence[dist.Work], after: Callable[[], None]) -> None:
        super().__init__()
        self._works = list(works)
        self._after: Callable[[], None] | None = after

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        while self._works:
            self._works.pop(0).wait()
        after, self._after = self._after, None
        if after is not None:
            after()
        return True


class _Paced(dist.ProcessGroup):
    def __init__(self, inner: dist.ProcessGroupGloo, rank: int, size: int, pace: Pace) -> None:
        super().__init__(rank, size)
        self._inner = inner
        self._pace = pace
        self._wire_free_us = 0.0

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "paced"

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        self._wire_free_us = max(now_us(), self._wire_free_us)
        self._wire_free_us += tensor.nbytes / self._pace.bytes_per_us
        there_us = torch.tensor([self._wire_free_us + self._pace.latency_us], dtype=torch.float64)
        works = [
            self._inner.send([there_us], to, tag + _STAMPS),
            self._inner.send(tensors, to, tag),
        ]
        return _Work(works, lambda: _keep(there_us, tensors))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        stamp = torch.zeros(1, dtype=torch.float64)
        works = [self._inner.recv([stamp], source, tag + _STAMPS)]
        works.append(self._inner.recv(tensors, source, tag))
        return _Work(works, lambda: _sleep_until(float(stamp)))

    def all_gather_single(self, into: Tensor, own: Tensor, options: Any = None) -> dist.Work:
        del options
        rows = into.view(self.size(), -1)
        rows[self.rank()] = own.view(-1)
        return self._exchange([own] * self.size(), list(rows))

    def all_to_all_single(
        self, into: Tensor, own: Tensor, into_sizes: Any, own_sizes: Any, options: Any = None
    ) -> dist.Work:
        del into_sizes, own_sizes, options
        rows, mine = into.view(self.size(), -1), own.view(self.size(), -1)
        rows[self.rank()] = mine[self.rank()]
        return self._exchange(list(mine), list(rows))

    # As torch called them before 2.13.
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single

    def _exchange(self, own: list[Tensor], into: list[Tensor]) -> dist.Work:
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        works: list[dist.Work] = [self.recv([into[rank]], rank) for rank in others]
        works += [self.send([own[rank]], rank) for rank in others]
        return _Work(works, lambda: None)


def _keep(*things: object) -> None:
    """Alive until the work is waited for."""


def _sleep_until(moment_us: float) -> None:
    left_us = moment_us - now_us()
    if left_us > 0:
        time.sleep(left_us / 1e6)
