"""Whether the ports that a job will listen on are free."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

from npu_pipe.comm.preflight import HcclSettings
from npu_pipe.finding import Finding, Verdict
from npu_pipe.launch.world import Launcher, World

__all__ = ["is_free", "port_findings"]

_HIGHEST = 65535
_LOOPBACK = "127.0.0.1"


def is_free(port: int) -> bool:
    """Whether this process could listen there, on any address; it does not."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that has just been closed
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def port_findings(
    world: World, *, local_ranks: int, backend: str, settings: HcclSettings | None
) -> tuple[Finding, ...]:
    """Of this host, before its ranks have met.

    settings: of HCCL, whose ports count where it is the backend; None if they cannot be read.
    """
    found = []
    if world.launcher in (Launcher.ONE_PROCESS, Launcher.LOCAL):
        found.append(_loopback())
    else:
        found.append(_meeting_place(world))
    if settings is not None and backend == "hccl":
        first = settings.base_port
        used = _used(range(first, min(first + local_ranks, _HIGHEST + 1)))
        facts = f"HCCL takes {first} to {first + local_ranks - 1} for {local_ranks} ranks"
        if used:
            found.append(
                Finding(
                    "ports",
                    f"{facts}, of which {', '.join(map(str, used))} {_are(used)} in use",
                    Verdict.REFUSE,
                    "end the other job, or give each job of a host its own HCCL_IF_BASE_PORT",
                )
            )
        else:
            found.append(Finding("ports", f"{facts}; they are free"))
    return tuple(found)


def _loopback() -> Finding:
    try:
        with socket.create_server((_LOOPBACK, 0)) as listener:
            socket.create_connection(listener.getsockname()[:2], timeout=1).close()
    except OSError as error:
        return Finding(
            "ports",
            f"the ranks of this host meet at {_LOOPBACK}, which does not answer: "
            f"{error.strerror or error}",
            Verdict.REFUSE,
            "ip link set lo up",
        )
    return Finding("ports", f"the ranks of this host meet at a free port of {_LOOPBACK}")


def _meeting_place(world: World) -> Finding:
    place = world.place
    if world.rank != 0 or world.agent_store or world.port == 0:
        who = "the launcher" if world.agent_store else "rank 0"
        return Finding("ports", f"the ranks meet at {place}, where {who} listens")
    if _used([world.port]):
        return Finding(
            "ports",
            f"the ranks meet at {place}, and something listens on port {world.port} already",
            Verdict.REFUSE,
            "end the other job, or give another MASTER_PORT",
        )
    return Finding("ports", f"the ranks meet at {place}, which is free")


def _used(ports: Iterable[int]) -> list[int]:
    return [port for port in ports if not is_free(port)]


def _are(ports: list[int]) -> str:
    return "is" if len(ports) == 1 else "are"
