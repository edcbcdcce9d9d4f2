"""Mesh: a connection between every two ranks, for short messages beside the process groups.

A message is a line of JSON. Nothing here waits for another rank once the mesh stands: a process
that ends closes its connections at once, however it ends, and one that is stopped is not waited
for.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from npu_pipe.errors import PeerError

__all__ = ["Mesh", "open_mesh"]

_CHUNK = 1 << 16


class Mesh:
    """One rank's ends: of `peers`, the rank at the other end -> the connection."""

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        self._peers = dict(peers)
        self._unread = dict.fromkeys(peers, b"")
        self._deaf: set[int] = set()  # who has left, or does not read
        self._sending = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._alarm, self._bell = socket.socketpair()
        self._selector.register(self._alarm, selectors.EVENT_READ, None)
        for rank, peer in peers.items():
            peer.setblocking(False)
            self._selector.register(peer, selectors.EVENT_READ, rank)
        _close_in_children(peers.values())

    def tell(self, message: Any) -> None:
        """Send to all that still read."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            for rank in self._peers.keys() - self._deaf:
                try:
                    whole = self._peers[rank].send(line) == len(line)
                except OSError:
                    whole = False
                if not whole:
                    self._deaf.add(rank)

    def hear(self, timeout_s: float) -> list[tuple[int, Any]]:
        """What has come, from whom, within the time: None once a connection has ended."""
        heard: list[tuple[int, Any]] = []
        for key, _ in self._selector.select(timeout_s):
            rank = key.data
            if rank is None:
                self._alarm.recv(_CHUNK)
                continue
            assert isinstance(key.fileobj, socket.socket)
            try:
                found = key.fileobj.recv(_CHUNK)
            except BlockingIOError:
                continue
            except OSError:
                found = b""
            *lines, self._unread[rank] = (self._unread[rank] + found).split(b"\n")
            heard += [(rank, json.loads(line)) for line in lines]
            if not found:
                self._selector.unregister(key.fileobj)
                heard.append((rank, None))
        return heard

    def wake(self) -> None:
        """Have `hear` return."""
        self._bell.send(b"!")

    def close(self) -> None:
        self._selector.close()
        for each in (self._alarm, self._bell, *self._peers.values()):
            each.close()


def open_mesh(
    rank: int, *, address: str, gather: Callable[[Any], list[Any]], patience_s: float
) -> Mesh:
    """Connect all ranks.

    address: where they met first; the way to it shows by which of its own addresses a rank is
        reached.
    gather: a JSON value of each rank -> those of all, on every rank.
    Raises PeerError when a rank cannot be reached.
    """
    try:
        own = _own_address(address)
    except OSError as error:
        raise _unreachable(rank, address, error) from error
    addresses = gather(own)
    # A loopback address is that of the host where all met: others reach it as they did then.
    local = all(map(_is_loopback, addresses))
    places = [address if _is_loopback(each) and not local else each for each in addresses]
    peers: dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server(
        (own if local or not _is_loopback(own) else "", 0), family=family, backlog=len(places)
    ) as server:
        answers = gather([server.getsockname()[1], secrets.token_hex(16)])
        try:
            for other in range(rank):
                port, secret = answers[other]
                peer = socket.create_connection((places[other], port), patience_s)
                peers[other] = peer
                peer.sendall(json.dumps([secret, rank]).encode() + b"\n")
            server.settimeout(patience_s)
            while len(peers) < len(places) - 1:
                peer, _ = server.accept()
                caller = _caller(peer, answers[rank][1], patience_s)
                if caller is None:  # not one of ours
                    peer.close()
                else:
                    peers[caller] = peer
        except OSError as error:
            for peer in peers.values():
                peer.close()
            missing = sorted(set(range(len(places))) - {rank, *peers})
            to = ", ".join(f"{other} at {places[other]}" for other in missing)
            raise _unreachable(rank, to, error) from error
    return Mesh(peers)


def _close_in_children(peers: Iterable[socket.socket]) -> None:
    """A forked process, such as a worker that loads data, would hold a connection open when its
    parent is killed; nobody would notice."""
    known = [weakref.ref(peer) for peer in peers]

    def close() -> None:
        for each in known:
            peer = each()
            if peer is not None:
                peer.close()

    os.register_at_fork(after_in_child=close)


def _caller(peer: socket.socket, secret: str, patience_s: float) -> int | None:
    """The rank that has connected, if it knows the secret."""
    peer.settimeout(patience_s)
    line = b""
    with suppress(OSError, ValueError):
        while not line.endswith(b"\n"):  # byte by byte: what follows is for the mesh
            byte = peer.recv(1)
            if not byte or len(line) > 100:
                return None
            line += byte
        told, rank = json.loads(line)
        return int(rank) if secrets.compare_digest(str(told), secret) else None
    return None


def _own_address(towards: str) -> str:
    """The address by which this host reaches another. Nothing is sent."""
    family, kind, _, _, place = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _unreachable(rank: int, to: str, error: OSError) -> PeerError:
    return PeerError(
        "every rank can connect to every other",
        f"rank {rank} did not reach {to}: {error}",
        "look for a firewall, or a name that resolves to another machine",
    )
