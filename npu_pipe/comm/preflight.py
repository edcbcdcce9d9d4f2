"""Preflight: what the communicators of a job will take of each device, before anything starts.

HCCL answers too many streams, ports in use or time-outs in the wrong order late, far from their
cause, and with codes. Here they are counted first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from npu_pipe.comm.device_pairs import Pair
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.errors import ConfigError

__all__ = ["HcclSettings", "Need", "check_needs", "needs", "table"]

_SIDE_STREAMS = (
    9  # of a rank: for sends, receives, and the ends of both, of two lanes; an empty one
)
_COMPUTE_STREAMS = 1
_HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class HcclSettings:
    """What HCCL and torch_npu read from the environment, with their defaults.

    buffer_mb: P2P_HCCL_BUFFSIZE; a communicator of two ranks has two such buffers. A job's
        lanes.buffer_mb comes before it, and lanes.transfer_s before HCCL_EXEC_TIMEOUT.
    group_buffer_mb: HCCL_BUFFSIZE; that of a whole group has two of these.
    streams: STREAMS_PER_DEVICE. base_port: HCCL_IF_BASE_PORT, the first of those of a host.
    connect_s, exec_s, event_s: HCCL_CONNECT_TIMEOUT, HCCL_EXEC_TIMEOUT, HCCL_EVENT_TIMEOUT.
    """

    buffer_mb: int = 20
    group_buffer_mb: int = 200
    streams: int = 32
    base_port: int = 60000
    connect_s: int = 120
    exec_s: int = 1800
    event_s: int = 1868


@dataclass(frozen=True, slots=True)
class Need:
    """What one rank takes: communicators, MB of their buffers, streams."""

    rank: int
    communicators: int
    buffers_mb: int
    streams: int


def needs(
    pairs: Iterable[Pair], settings: HcclSettings, *, ranks: int, groups: int = 0
) -> tuple[Need, ...]:
    """Of each rank of a pipeline; pairs: see `pairs_used`. groups: how many a rank is in besides,
    as of its replicas; each has a communicator of its own."""
    count = [0] * ranks
    for _, low, high in pairs:
        count[low] += 1
        count[high] += 1
    return tuple(
        Need(
            rank,
            each + groups,
            2 * (settings.buffer_mb * each + settings.group_buffer_mb * groups),
            _COMPUTE_STREAMS + _SIDE_STREAMS + each + groups,
        )
        for rank, each in enumerate(count)
    )


def check_needs(
    found: Iterable[Need],
    settings: HcclSettings,
    *,
    local_rank: int,
    is_free: Callable[[int], bool],
    room_mb: float = math.inf,
) -> None:
    """Raise ConfigError for what cannot go well. is_free: whether nobody uses a port. room_mb: of
    the device's memory."""
    ordered = (settings.connect_s, settings.exec_s, settings.event_s)
    if not settings.connect_s < settings.exec_s < settings.event_s:
        raise ConfigError(
            "HCCL_CONNECT_TIMEOUT < HCCL_EXEC_TIMEOUT < HCCL_EVENT_TIMEOUT",
            f"they are {', '.join(map(str, ordered))} seconds",
            "leave them and lanes.transfer_s out (120, 1800, 1868), or raise the later ones too",
        )
    port = settings.base_port + local_rank
    if port > _HIGHEST_PORT:
        raise ConfigError(
            "HCCL uses a port of its own for each rank of a host, from HCCL_IF_BASE_PORT up",
            f"from {settings.base_port}, local rank {local_rank} would use port {port}",
            "set HCCL_IF_BASE_PORT to 60000",
        )
    if not is_free(port):
        raise ConfigError(
            "HCCL uses a port of its own for each rank of a host, from HCCL_IF_BASE_PORT up",
            f"port {port}, of local rank {local_rank}, is in use",
            "end the other job, or give this one another HCCL_IF_BASE_PORT",
        )
    most = max(found, key=lambda each: each.streams)
    if most.streams > settings.streams:
        raise ConfigError(
            "the streams of a rank are within STREAMS_PER_DEVICE",
            f"rank {most.rank} needs {most.streams}, {most.communicators} of them for "
            f"communicators, and STREAMS_PER_DEVICE is {settings.streams}",
            "set STREAMS_PER_DEVICE=32, or take a schedule in which fewer ranks are neighbours",
        )
    fullest = max(found, key=lambda each: each.buffers_mb)
    if fullest.buffers_mb > room_mb:
        raise ConfigError(
            "the buffers of a rank's communicators fit into its device",
            f"rank {fullest.rank} needs {fullest.buffers_mb} MB for {fullest.communicators}, and "
            f"{room_mb:.0f} MB are free",
            "leave lanes.buffer_mb, P2P_HCCL_BUFFSIZE and HCCL_BUFFSIZE out (20, 20, 200), or end "
            "what else holds the device's memory",
        )


def table(
    found: Iterable[Need],
    settings: HcclSettings,
    lanes: LaneOptions,
    *,
    prefetch: int,
    groups: Sequence[str] = (),
) -> str:
    """For a person: what each rank takes, the limits, and what the lanes are made with. groups:
    the names of those that were counted besides."""
    lines = ["rank  communicators  buffers  streams"]
    for each in found:
        lines.append(
            f"{each.rank:>4}  {each.communicators:>13}  {each.buffers_mb:>4} MB  "
            f"{each.streams:>2} of {settings.streams}"
        )
    lines += [
        f"one of its communicators is of {name} ranks, with 2 x {settings.group_buffer_mb} MB"
        for name in groups
    ]
    lines.append(
        f"ports from {settings.base_port}; time-outs: connect {settings.connect_s} s, "
        f"exec {settings.exec_s} s, event {settings.event_s} s"
    )
    options = {
        "traffic class": lanes.traffic_class,
        "service level": lanes.service_level,
        "expansion mode": lanes.expansion_mode,
    }
    told = (f"{name} {value}" for name, value in options.items() if value is not None)
    lines.append(", ".join((f"lanes: prefetch {prefetch}", *told)))
    return "\n".join(lines)
