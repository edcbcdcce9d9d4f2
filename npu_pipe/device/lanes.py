"""LaneOptions: how the communicators of a job's lanes are made. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from npu_pipe.errors import ConfigError

__all__ = ["LaneOptions", "check_lanes", "given", "in_vain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """The lanes between ranks on accelerators; what is left out is left to the backend."""

    buffer_mb: int | None = None
    """MB of each buffer of a communicator: P2P_HCCL_BUFFSIZE, or NCCL_BUFFSIZE."""
    traffic_class: int | None = None
    """Quality of service on the network, 0 to 255."""
    service_level: int | None = None
    """Quality of service on the network, 0 to 7; HCCL only."""
    expansion_mode: int | None = None
    """Where HCCL runs its own steps: 0 as it likes, 1 host, 2 device, 3 vector cores."""
    transfer_s: int | None = None
    """Seconds after which the backend itself gives a transfer up: HCCL_EXEC_TIMEOUT. A rank that is
    late is found by pipeline.timeout_s, and much sooner."""


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "buffer_mb": (1, 1 << 16),
    "traffic_class": (0, 255),
    "service_level": (0, 7),
    "expansion_mode": (0, 3),
    "transfer_s": (1, 10**6),
}
_KNOWN: Mapping[str, frozenset[str]] = {
    "hccl": frozenset(_BOUNDS),
    "nccl": frozenset({"buffer_mb", "traffic_class", "transfer_s"}),
}


def check_lanes(options: LaneOptions) -> None:
    """Raise ConfigError for options outside their bounds."""
    for name, value in given(options).items():
        least, most = _BOUNDS[name]
        if not least <= value <= most:  # True for NaN
            raise ConfigError(
                f"lanes.{name} is from {least} to {most}",
                f"it is {value}",
                f"give lanes.{name} in these bounds, or leave it out",
            )


def given(options: LaneOptions) -> dict[str, int]:
    """What was not left out, by name."""
    return {name: value for name, value in asdict(options).items() if value is not None}


def in_vain(options: LaneOptions, *, backend: str) -> list[str]:
    """The names of those that were given and that this backend does not have."""
    return [name for name in given(options) if name not in _KNOWN.get(backend, ())]
