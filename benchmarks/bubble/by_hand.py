"""The floor: the same stages and the same order, in a loop with nothing around it.

No shapes to agree on, no failures to hear of, no timeline, nothing but 32 bytes through a socket.
What such a loop takes over the ideal is due to Python, autograd and the machine, not to a runtime.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from npu_pipe import Action, Kind, Schedule

__all__ = ["by_hand"]

Loss = Callable[[Tensor, Tensor], Tensor]


def by_hand(schedule: Schedule, module: nn.Module, loss: Loss) -> Callable[[Tensor, Tensor], None]:
    """A step of a schedule with one stage a rank and whole backwards, made by all ranks at once."""
    rank, last = dist.get_rank(), schedule.ranks - 1
    before, behind = _neighbours(rank, last)

    def step(inputs: Tensor, targets: Tensor) -> None:
        size = inputs[:1].nbytes
        living: dict[int, tuple[Tensor, Tensor]] = {}
        for action in schedule.orders[rank]:
            assert isinstance(action, Action)
            one = slice(action.microbatch, action.microbatch + 1)
            if action.kind is Kind.F:
                x = inputs[one] if before is None else _take(before, size).requires_grad_()
                y = module(x)
                if behind is None:
                    y = loss(y, targets[one]) / schedule.microbatches
                else:
                    behind.send(y.detach().numpy().tobytes())
                living[action.microbatch] = x, y
            else:
                x, y = living.pop(action.microbatch)
                torch.autograd.backward([y], [None if behind is None else _take(behind, size)])
                if before is not None:
                    assert x.grad is not None
                    before.send(x.grad.numpy().tobytes())

    return step


def _take(source: socket.socket, size: int) -> Tensor:
    return torch.frombuffer(bytearray(source.recv(size)), dtype=torch.float32).view(1, -1)


def _neighbours(rank: int, last: int) -> tuple[socket.socket | None, socket.socket | None]:
    """To the rank before and to the one behind, in packets. Each listens for the one behind."""
    server = None
    if rank < last:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.bind("")  # a name of its own, which the kernel chooses
        server.listen(1)
    names: list[bytes | None] = [None] * (last + 1)
    dist.all_gather_object(names, server.getsockname() if server else None)
    before = None
    if rank > 0:
        before = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before.connect(names[rank - 1])
    behind = server.accept()[0] if server else None
    if server:
        server.close()
    return before, behind
