"""Where the ranks meet: what goes wrong is told in one sentence, and in no words of torch."""

from __future__ import annotations

import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launched import PATIENCE_S, Launched, free_port

from npu_pipe.errors import ConfigError, PeerError
from npu_pipe.launch import reach
from npu_pipe.launch.reach import find_address, find_listener, why_in_vain
from npu_pipe.launch.store import open_store
from npu_pipe.launch.world import Launcher, Sources, World

pytestmark = pytest.mark.timeout(60)

SOURCES = Sources(
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    address="first host of SLURM_STEP_NODELIST",
    port="made from SLURM_JOB_ID and SLURM_STEP_ID",
)


def world(rank: int, port: int, address: str = "127.0.0.1") -> World:
    return World(
        rank=rank,
        size=2,
        local_rank=rank,
        address=address,
        port=port,
        launcher=Launcher.BY_HAND,  # which has no process that could be followed
        sources=SOURCES,
    )


def test_a_port_that_is_taken_is_named_with_where_it_came_from() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            open_store(world(0, port), timeout_s=2)
    assert caught.value.facts == (
        f"127.0.0.1:{port} is in use (address: first host of SLURM_STEP_NODELIST, "
        "port: made from SLURM_JOB_ID and SLURM_STEP_ID)"
    )


@pytest.mark.parametrize(
    ("address", "why"),
    [("127.0.0.1", "connection refused"), ("no-such-host.invalid", "not known")],
)
def test_a_rank_that_finds_nobody_says_so_and_torch_says_nothing(
    address: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    with pytest.raises(PeerError) as caught:
        open_store(world(1, port, address), timeout_s=1)
    assert caught.value.rule == f"all 2 ranks meet at {address}:{port} within 1 s"
    assert "rank 1 found no store there" in caught.value.facts
    assert why in caught.value.facts
    assert "first host of SLURM_STEP_NODELIST" in caught.value.facts
    assert capfd.readouterr() == ("", "")


def test_rank_0_too_has_to_know_the_name_that_the_others_look_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(PeerError) as caught:
        open_store(world(0, free_port(), "no-such-host.invalid"), timeout_s=1)
    assert "rank 0 found no store there" in caught.value.facts
    assert "not known" in caught.value.facts
    assert capfd.readouterr() == ("", "")


def test_somebody_who_comes_late_is_waited_for() -> None:
    port = free_port()
    servers: list[socket.socket] = []

    def come() -> None:
        time.sleep(0.5)
        servers.append(socket.create_server(("127.0.0.1", port)))

    thread = threading.Thread(target=come)
    thread.start()
    look = find_listener
    assert why_in_vain(look, "127.0.0.1", port, within_s=20, tell=pytest.fail) is None
    thread.join()
    servers[0].close()


def test_somebody_who_never_comes_is_given_up_in_time() -> None:
    start_s = time.monotonic()
    look, port = find_listener, free_port()
    assert why_in_vain(look, "127.0.0.1", port, within_s=0.5, tell=pytest.fail) == (
        "connection refused"
    )
    assert time.monotonic() - start_s < 5


def test_a_long_wait_for_an_address_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "QUIET_S", 0.1)
    told: list[str] = []
    look, port = find_listener, free_port()
    assert why_in_vain(look, "127.0.0.1", port, within_s=1, tell=told.append) == told[0]
    assert told == ["connection refused"]


@pytest.mark.parametrize("address", ["a..b", "no-such-host.invalid", "[::1]"])
def test_a_name_that_nobody_has_is_no_crash(address: str) -> None:
    for look in (find_address, find_listener):
        assert why_in_vain(look, address, 4711, within_s=0, tell=pytest.fail)


@pytest.mark.parametrize(("words", "why"), [(b"", "hangs up"), (b"SSH-2.0-x", "is no store")])
def test_another_program_at_the_port_is_told_apart_from_a_store(
    words: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "_GREETING_S", 20)  # for a busy machine

    class Greeter(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(words)

    with socketserver.TCPServer(("127.0.0.1", 0), Greeter) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_address[1]
        found = why_in_vain(find_listener, "127.0.0.1", port, within_s=0, tell=pytest.fail)
        server.shutdown()
        thread.join()
    assert found == f"who listens there {why}"


ALONE = """
import sys
from npu_pipe.launch.store import open_store
from npu_pipe.launch.world import Launcher, World
place = dict(local_rank=0, address="127.0.0.1", port=int(sys.argv[1]))
world = World(rank=1, size=2, launcher=Launcher.BY_HAND, **place)
try:
    open_store(world, timeout_s=2)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def test_one_that_takes_a_call_and_never_answers_does_not_hold_a_rank_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-c", ALONE, str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.stderr.startswith("PeerError: all 2 ranks meet at")
    assert "rank 1 found no store there: no answer within" in done.stderr
    assert done.stderr.count("\n") == 1


def start_rank(job: Launched, rank: int, size: int, address: str, port: int) -> None:
    job.start(
        [sys.executable, str(Path(__file__).parent / "worker.py"), "step"],
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )


@pytest.mark.timeout(400)
def test_two_processes_of_one_rank_are_both_told_at_once_and_so_are_the_others(
    job: Launched,
) -> None:
    """As msrun numbers the ranks of nodes with an uneven --local_worker_num."""
    port = free_port()
    for rank in (0, 1, 1):
        start_rank(job, rank, 3, "127.0.0.1", port)
    assert all(job.end(within_s=PATIENCE_S))
    said = job.output()
    assert said.count("as rank 1 of 3, which process ") == 1
    assert said.count("PeerError: all 3 ranks meet at") == 2
    assert "two processes say that they are rank 1: process " in said
    assert "in vain" not in said


@pytest.mark.timeout(400)
def test_ranks_meet_at_an_address_of_ip_version_6(job: Launched) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("IPv6: this machine has none")
    port = free_port()
    for rank in range(2):
        start_rank(job, rank, 2, "::1", port)
    assert job.end(within_s=PATIENCE_S) == [0, 0], job.output()
