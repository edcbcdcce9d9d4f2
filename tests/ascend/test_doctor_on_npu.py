"""npu-pipe doctor on NPUs, and where torch_npu is installed without CANN."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ascend_cluster import environment

pytestmark = pytest.mark.timeout(600)


def doctor(*flags: str, **variables: str) -> tuple[int, dict[str, Any]]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TORCH_DEVICE")}
    done = subprocess.run(
        [sys.executable, "-m", "npu_pipe", "doctor", "--json", *flags],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def named(found: dict[str, Any], name: str) -> list[tuple[str, str]]:
    return [(each["verdict"], each["facts"]) for each in found["findings"] if each["name"] == name]


def test_without_cann_it_runs_and_says_what_is_missing(emulator: tuple[Path, Path]) -> None:
    _, site = emulator
    status, found = doctor(PYTHONPATH=str(site))
    assert status == 0, "training may start: on the CPU"
    assert found["versions"]["torch_npu"]
    assert found["versions"]["cann"] is None
    ((verdict, facts),) = named(found, "pairing")
    assert verdict == "warn"
    assert "CANN is missing" in facts
    (_, devices), *_ = named(found, "devices")
    assert "libhccl.so" in devices
    assert any("TORCH_DEVICE_BACKEND_AUTOLOAD" in text for _, text in named(found, "variables"))
    assert found["links"][0]["is_correct"]


def test_an_npu_that_was_asked_for_and_is_not_there_is_refused(emulator: tuple[Path, Path]) -> None:
    _, site = emulator
    status, found = doctor("--device", "npu", PYTHONPATH=str(site))
    assert status == 1
    assert [verdict for verdict, _ in named(found, "pairing")] == ["refuse"]
    assert [verdict for verdict, _ in named(found, "devices")] == ["refuse"]


def test_transfers_are_tried_on_the_lanes_of_npus(emulator: tuple[Path, Path]) -> None:
    variables = environment(*emulator, {"devices": 4})
    status, found = doctor("--ranks", "3", **variables)
    assert status == 0, found["findings"]
    assert [rank["device"] for rank in found["ranks"]] == ["npu:0", "npu:1", "npu:2"]
    assert all(rank["total_bytes"] >= rank["free_bytes"] > 0 for rank in found["ranks"])
    assert [(link["low"], link["high"]) for link in found["links"]] == [(0, 1), (1, 2)]
    assert all(link["is_correct"] for link in found["links"])
    ((verdict, lanes),) = named(found, "lanes")
    assert verdict == "ok"
    assert "communicators" in lanes
    assert named(found, "pairing") == [], "CANN loads, wherever it lies"


def test_on_npus_what_hccl_cannot_run_with_is_refused(emulator: tuple[Path, Path]) -> None:
    variables = environment(*emulator, {"devices": 2})
    status, found = doctor(
        **variables, HCCL_EXEC_TIMEOUT="100", HCCL_SOCKET_IFNAME="=eth77", HCCL_IF_IP="192.0.2.1"
    )
    assert status == 1
    refused = [facts for verdict, facts in named(found, "variables") if verdict == "refuse"]
    assert len(refused) == 3
    assert named(found, "transfers") == [("warn", "not tried: what is refused comes first")]


def test_more_ranks_than_npus_are_refused(emulator: tuple[Path, Path]) -> None:
    status, found = doctor("--ranks", "3", **environment(*emulator, {"devices": 2}))
    assert status == 1
    ((verdict, facts),) = named(found, "devices")
    assert verdict == "refuse"
    assert "2 npu (" in facts
    assert "3 ranks on the host" in facts
