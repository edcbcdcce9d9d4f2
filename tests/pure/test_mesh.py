"""The connections that ranks tell each other of failures by; threads stand for the ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from npu_pipe.comm.mesh import Mesh, open_mesh
from npu_pipe.errors import PeerError

RANKS = 3


def on_all(job: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """Run job(rank, gather) in a thread for each rank."""
    barrier = Barrier(RANKS)
    values: list[Any] = [None] * RANKS

    def run(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

        return job(rank, gather)

    with ThreadPoolExecutor(RANKS) as pool:
        return [each.result() for each in [pool.submit(run, rank) for rank in range(RANKS)]]


def open_all(address: str) -> list[Mesh]:
    return on_all(
        lambda rank, gather: open_mesh(rank, address=address, gather=gather, patience_s=5)
    )


def hear(mesh: Mesh, count: int) -> list[tuple[int, Any]]:
    heard: list[tuple[int, Any]] = []
    while len(heard) < count:
        found = mesh.hear(5)
        assert found
        heard += found
    return sorted(heard, key=lambda each: each[0])


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_what_one_tells_all_others_hear(address: str) -> None:
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else 2).close()
    except OSError:
        pytest.skip("this machine has no such address")
    meshes = open_all(address)
    for rank, mesh in enumerate(meshes):
        mesh.tell({"from": rank})
    for rank, mesh in enumerate(meshes):
        others = [other for other in range(RANKS) if other != rank]
        assert hear(mesh, RANKS - 1) == [(other, {"from": other}) for other in others]
    for mesh in meshes:
        mesh.close()


def test_the_last_word_comes_before_the_end() -> None:
    first, second, third = open_all("127.0.0.1")
    second.tell("why")
    second.close()
    for mesh in (first, third):
        assert hear(mesh, 2) == [(1, "why"), (1, None)]
    third.tell("to who is left")
    assert hear(first, 1) == [(2, "to who is left")]
    first.close()
    third.close()


def test_who_does_not_read_is_not_waited_for() -> None:
    """As a stopped process does not."""
    first, second, third = open_all("127.0.0.1")
    long = "x" * 100_000
    for _ in range(200):
        first.tell(long)
    for mesh in (first, second, third):
        mesh.close()


def test_a_stranger_is_turned_away() -> None:
    def job(rank: int, gather: Callable[[Any], list[Any]]) -> Any:
        def told(value: Any) -> list[Any]:
            found = gather(value)
            if rank == 2 and isinstance(value, list):  # before it connects itself
                for line in (b"hello\n", b'["guess", 1]\n', b""):
                    with socket.create_connection(("127.0.0.1", found[0][0])) as stranger:
                        stranger.sendall(line)
            return found

        return open_mesh(rank, address="127.0.0.1", gather=told, patience_s=5)

    meshes = on_all(job)
    meshes[1].tell("it is me")
    assert hear(meshes[0], 1) == [(1, "it is me")]
    for mesh in meshes:
        mesh.close()


def test_a_rank_that_cannot_be_reached_is_named() -> None:
    def job(rank: int, gather: Callable[[Any], list[Any]]) -> str:
        def told(value: Any) -> list[Any]:
            found = gather(value)
            if rank == 1 and isinstance(value, list):
                raise RuntimeError("gone before it connects")
            return found

        try:
            open_mesh(rank, address="127.0.0.1", gather=told, patience_s=0.5).close()
        except (PeerError, RuntimeError) as error:
            return str(error)
        return "connected"

    zero, one, two = on_all(job)
    assert one == "gone before it connects"
    assert "rank 0 did not reach 1 at 127.0.0.1" in zero
    assert "rank 2 did not reach 1 at 127.0.0.1" in two or two == "connected"
