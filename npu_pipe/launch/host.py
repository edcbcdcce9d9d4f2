"""Host: what the operating system says of this machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from npu_pipe.finding import Finding, Verdict

__all__ = ["Host", "machine_id", "memory_finding", "this_host"]

_GIB = 1 << 30
_LEAST_BYTES = _GIB // 2  # that a rank takes: torch alone is half of it


@dataclass(frozen=True, slots=True)
class Host:
    """cores: that this process may use. interfaces: of the network, by name.
    Bytes are None where the system does not tell."""

    name: str
    cores: int
    interfaces: tuple[str, ...]
    memory_bytes: int | None = None
    available_bytes: int | None = None


def this_host(system: Path = Path("/")) -> Host:
    """system: the folder that its files lie under."""
    memory = _meminfo(system / "proc/meminfo")
    limit, used = (_number(system / f"sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    if limit is not None and total is not None and limit < total:
        total = limit
        available = min(available or limit, limit - (used or 0))
    return Host(
        name=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        memory_bytes=total,
        available_bytes=available,
    )


def machine_id(system: Path = Path("/")) -> str:
    """What tells this machine, as it runs now, from others of the same name."""
    try:
        return (system / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def memory_finding(host: Host, *, local_ranks: int) -> Finding:
    """Whether the ranks of a host fit into its memory before they hold anything."""
    if host.memory_bytes is None or host.available_bytes is None:
        return Finding("memory", "the system does not tell")
    facts = (
        f"{host.available_bytes / _GIB:.1f} of {host.memory_bytes / _GIB:.1f} GiB of the host free"
    )
    if host.available_bytes >= local_ranks * _LEAST_BYTES:
        return Finding("memory", facts)
    return Finding(
        "memory",
        f"{facts}, and {local_ranks} ranks take {_LEAST_BYTES / _GIB} GiB each before they hold "
        "anything",
        Verdict.WARN,
        "end other programs, start fewer ranks, or give the container more",
    )


def _meminfo(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
