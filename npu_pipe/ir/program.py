"""Program: a schedule with its transfers placed; and the lanes that they travel on.

    rank 0   0F0 0SEND_F0 0F1 0SEND_F1 ...  0RECV_B0 0B0
                    |  lane down                ^  lane up
    rank 1       1RECV_F0 1F0 1B0 ...       1SEND_B0

Two lanes, `down` to a higher rank and `up` to a lower one, each with its own process group:
in one lane a pair of ranks only ever sends one way, in loops, V shapes and with two ranks too.
Activations and gradients that go the same way share a lane.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from npu_pipe.ir.action import Action, FusedPair, Kind, Step
from npu_pipe.ir.schedule import Schedule

__all__ = ["Lane", "Program", "Route", "compute_of", "peer_of", "route"]


class Lane(enum.StrEnum):
    """One direction of boundary traffic."""

    DOWN = "down"
    UP = "up"


class Route(NamedTuple):
    """Where a transfer goes."""

    source: int
    target: int
    lane: Lane


@dataclass(frozen=True, slots=True)
class Program:
    """What each rank executes. `check` proves that it cannot hang.

    schedule: what is computed; a program keeps each rank's order of compute.
    orders: per rank, compute steps and transfers in the order of one global clock. Compute runs
        in this order, and the sends and the receives of each lane; a transfer may run earlier
        than it stands beside compute, never later.
    prefetch: how many inputs of one lane a rank may have asked for and not begun to use: the
        n-th receive of a lane is posted when the use of input n - prefetch begins.
    """

    schedule: Schedule
    orders: tuple[tuple[Step, ...], ...]
    prefetch: int = 2
    # What `check` found out, as in Schedule.
    _proof: object = field(default=None, init=False, repr=False, compare=False)


def compute_of(order: tuple[Step, ...]) -> tuple[Step, ...]:
    """The order without its transfers."""
    return tuple(step for step in order if isinstance(step, FusedPair) or step.kind in _COMPUTE)


def peer_of(transfer: Action) -> Action:
    """The other end: 1SEND_F3 <-> 2RECV_F3, 2SEND_B3 <-> 1RECV_B3."""
    kind, stage, microbatch = transfer
    ends = {
        Kind.SEND_F: (Kind.RECV_F, 1),
        Kind.RECV_F: (Kind.SEND_F, -1),
        Kind.SEND_B: (Kind.RECV_B, -1),
        Kind.RECV_B: (Kind.SEND_B, 1),
    }
    peer, offset = ends[kind]
    return Action(peer, stage + offset, microbatch)


def route(schedule: Schedule, transfer: Action) -> Route:
    """The ranks and the lane of a SEND or RECV."""
    here, there = schedule.rank_of(transfer), schedule.rank_of(peer_of(transfer))
    source, target = (here, there) if transfer.kind.is_send else (there, here)
    return Route(source, target, Lane.DOWN if target > source else Lane.UP)


_COMPUTE = frozenset(kind for kind in Kind if kind.is_compute)
