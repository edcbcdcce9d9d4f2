"""Pairs: a local socket between every two ranks of one host.

They carry numbers of slots (see `slots`) and short messages. A process that ends closes
its sockets, however it ends.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["connect_pairs"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BUFFER_BYTES = 1 << 22


def connect_pairs(
    rank: int, size: int, *, gather: Callable[[Any], list[Any]]
) -> dict[int, socket.socket] | None:
    """Connect to each other rank; collective. None if not all ranks share a host.

    gather: a JSON value of each rank -> those of all, on every rank.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        name = f"npu_pipe {secrets.token_hex(16)}"
        here = None
        if hasattr(os, "memfd_create") and _BOOT_ID.exists():
            server.bind(f"\0{name}")  # known to nobody else, and no file that could be left behind
            server.listen(size)
            here = _BOOT_ID.read_text()
        answers = gather([here, name])
        pairs: dict[int, socket.socket] = {}
        # Nobody need accept for a connection to stand.
        reached = here is not None and all(
            host == here and _reach(rank, peer, f"\0{name}", pairs)
            for peer, (host, name) in enumerate(answers[:rank])
        )
        if not all(gather(reached)):
            for pair in pairs.values():
                pair.close()
            return None
        for _ in range(rank + 1, size):
            pair, _ = server.accept()
            pairs[int.from_bytes(pair.recv(4), "little")] = pair
    for pair in pairs.values():
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            pair.setsockopt(socket.SOL_SOCKET, side, _BUFFER_BYTES)
    return dict(sorted(pairs.items()))


def _reach(rank: int, peer: int, place: str, pairs: dict[int, socket.socket]) -> bool:
    """Whether a rank could be reached: not in a container with a network of its own."""
    pair = pairs[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pair.connect(place)
        pair.send(rank.to_bytes(4, "little"))
    except OSError:
        return False
    return True
