"""The floor: the same stages and the same order, in a loop with nothing around it.

No shapes to agree on, no failures to hear of, no timeline, nothing but 32 bytes through a socket.
What such a loop takes over the ideal is due to Python, autograd and the machine, not to a runtime.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from sleeper import Sleeper
from torch import Tensor

from npu_pipe import Action, Kind, Schedule

__all__ = ["by_hand"]

Loss = Callable[[Tensor, Tensor], Tensor]
_TAG = 3  # bytes before a value: F or not, stage, microbatch


class _Living(NamedTuple):
    """What a stage keeps of a microbatch: its input, what its layer made of it, its output."""

    x: Tensor
    hidden: Tensor
    y: Tensor


def by_hand(
    schedule: Schedule, stages: Mapping[int, Sleeper], loss: Loss
) -> Callable[[Tensor, Tensor], None]:
    """A step of a schedule, made by all ranks at once."""
    rank, last = dist.get_rank(), schedule.stages - 1
    sockets = _connect(schedule, rank)
    places, orders = schedule.placement, schedule.orders[rank]
    hidden: dict[int, Tensor] = {}
    for stage, module in stages.items():
        module.layer.register_forward_hook(_keep_in(hidden, stage))

    def step(inputs: Tensor, targets: Tensor) -> None:
        here: dict[bytes, Tensor] = {}  # come, or left by another stage of this rank
        living: dict[tuple[int, int], _Living] = {}
        after: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # for W

        def take(tag: bytes, source: int) -> Tensor:
            while tag not in here:
                packet = bytearray(sockets[places[source]].recv(_TAG + inputs[:1].nbytes))
                here[bytes(packet[:_TAG])] = torch.frombuffer(
                    packet[_TAG:], dtype=torch.float32
                ).view(1, -1)
            return here.pop(tag)

        def give(tag: bytes, target: int, value: Tensor) -> None:
            if places[target] == rank:
                here[tag] = value
            else:
                sockets[places[target]].send(tag + value.numpy().tobytes())

        for action in orders:
            assert isinstance(action, Action)
            kind, stage, microbatch = action
            one, key = slice(microbatch, microbatch + 1), (stage, microbatch)
            if kind is Kind.F:
                x = inputs[one]
                if stage > 0:
                    x = take(bytes((1, stage, microbatch)), stage - 1).requires_grad_()
                y = stages[stage](x)
                if stage == last:
                    y = loss(y, targets[one]) / schedule.microbatches
                else:
                    give(bytes((1, stage + 1, microbatch)), stage + 1, y.detach())
                living[key] = _Living(x, hidden.pop(stage), y)
                continue
            layer = stages[stage].layer
            if kind is Kind.W:
                x, gradient = after.pop(key)
                layer.weight.grad = stages[stage].sleep(gradient.t() @ x)
                continue
            x, inner, y = living.pop(key)
            above = None
            if stage < last:
                above = take(bytes((0, stage, microbatch)), stage + 1)
            if kind is Kind.B:
                torch.autograd.backward([y], [above])
                below = x.grad
            else:
                (gradient,) = torch.autograd.grad([y], [inner], [above])
                after[key] = x.detach(), gradient
                below = gradient @ layer.weight.detach()
            if stage > 0:
                assert below is not None
                give(bytes((0, stage - 1, microbatch)), stage - 1, below)

    return step


def _keep_in(hidden: dict[int, Tensor], stage: int) -> Callable[..., None]:
    def keep(_layer: torch.nn.Module, _inputs: object, output: Tensor) -> None:
        hidden[stage] = output

    return keep


def _connect(schedule: Schedule, rank: int) -> dict[int, socket.socket]:
    """To each rank with a stage beside one of this rank's, in packets. The lower one listens."""
    pairs = sorted({(min(p), max(p)) for p in pairwise(schedule.placement) if p[0] != p[1]})
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind("")  # a name of its own, which the kernel chooses
    server.listen()
    names: list[bytes | None] = [None] * schedule.ranks
    dist.all_gather_object(names, server.getsockname())
    found: dict[int, socket.socket] = {}
    for low, high in pairs:
        if rank == high:
            found[low] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            found[low].connect(names[low])
            found[low].send(bytes((high,)))
    for _ in [pair for pair in pairs if pair[0] == rank]:
        other, _address = server.accept()
        found[other.recv(1)[0]] = other
    server.close()
    return found
