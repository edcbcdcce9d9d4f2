"""Where the ranks meet: what goes wrong is told in one sentence, and in no words of torch."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from launched import free_port

from npu_pipe.errors import ConfigError, PeerError
from npu_pipe.launch import reach
from npu_pipe.launch.reach import why_unreachable
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


def test_somebody_who_comes_late_is_waited_for() -> None:
    port = free_port()
    servers: list[socket.socket] = []

    def come() -> None:
        time.sleep(0.5)
        servers.append(socket.create_server(("127.0.0.1", port)))

    thread = threading.Thread(target=come)
    thread.start()
    assert why_unreachable("127.0.0.1", port, within_s=20, tell=pytest.fail) is None
    thread.join()
    servers[0].close()


def test_somebody_who_never_comes_is_given_up_in_time() -> None:
    start_s = time.monotonic()
    why = why_unreachable("127.0.0.1", free_port(), within_s=0.5, tell=pytest.fail)
    assert why == "connection refused"
    assert time.monotonic() - start_s < 5


def test_a_long_wait_for_an_address_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "QUIET_S", 0.1)
    told: list[str] = []
    assert why_unreachable("127.0.0.1", free_port(), within_s=1, tell=told.append) == told[0]
    assert told == ["connection refused"]
