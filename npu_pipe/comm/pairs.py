"""Pairs: a local socket between every two ranks of one host.

They carry numbers of slots (see `slots`) and short messages. A process that ends closes
its sockets, however it ends.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["connect_pairs"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BUFFER_BYTES = 1 << 22


def connect_pairs(
    rank: int, size: int, *, gather: Callable[[Any], list[Any]], patience_s: float
) -> dict[int, socket.socket] | None:
    """Connect to each other rank; collective. None if not all ranks share a host.

    gather: a JSON value of each rank -> those of all, on every rank.
    """
    peers = set(range(size)) - {rank}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        name = f"npu_pipe {secrets.token_hex(16)}"
        here = None
        if hasattr(os, "memfd_create") and _BOOT_ID.exists():
            server.bind(f"\0{name}")  # known to nobody else, and no file that could be left behind
            server.listen(len(peers))
            here = _BOOT_ID.read_text()
        answers = gather([here, name])
        if here is None or any(host != here for host, _ in answers):
            gather(False)
            return None
        pairs: dict[int, socket.socket] = {}
        with suppress(OSError):  # a container with a network of its own
            _connect(rank, peers, server, [name for _, name in answers], patience_s, pairs)
    if all(gather(len(pairs) == len(peers))):
        return pairs
    for pair in pairs.values():
        pair.close()
    return None


def _connect(
    rank: int,
    peers: Collection[int],
    server: socket.socket,
    names: list[str],
    patience_s: float,
    pairs: dict[int, socket.socket],
) -> None:
    for peer in sorted(peers):
        if peer < rank:
            pair = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pair.settimeout(patience_s)
            pair.connect(f"\0{names[peer]}")
            pair.send(rank.to_bytes(4, "little"))
            pairs[peer] = pair
    server.settimeout(patience_s)
    while len(pairs) < len(peers):
        pair, _ = server.accept()
        pair.settimeout(patience_s)
        pairs[int.from_bytes(pair.recv(4), "little")] = pair
    for pair in pairs.values():
        pair.settimeout(None)
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            pair.setsockopt(socket.SOL_SOCKET, side, _BUFFER_BYTES)
