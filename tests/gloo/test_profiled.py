"""What a profile of a step shows, and that nothing is done for it where none is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster

from npu_pipe.device.cpu import Cpu
from npu_pipe.device.naming import named
from npu_pipe.ir.action import Action, Kind
from npu_pipe.runtime.record import Recorder


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_each_action_has_its_range_by_its_own_name_and_only_while_a_profile_is_taken(
    cluster: Callable[[int], Cluster], name: str
) -> None:
    for found in cluster(2).values("profiled.steps", name=name, microbatches=4):
        assert sorted(found["names"]) == sorted(found["wanted"])
        assert found["outside"] == 0


@pytest.mark.timeout(60)
def test_an_action_that_fails_ends_its_range(cluster: Callable[[int], Cluster]) -> None:
    """Its third forward, the second in the profile, which has no more of rank 0 then."""
    arguments = {"name": "gpipe", "microbatches": 4, "fails": 6}
    first, second = cluster(2).values("profiled.steps", **arguments)
    assert (first["error"], second["error"]) == ("ValueError", "PeerError")
    assert first["names"] == ["action 0F0", "action 0F1"]


def test_without_a_profile_the_executor_gets_the_recorder_itself(tmp_path: Path) -> None:
    recorder, device, action = Recorder(), Cpu(), Action(Kind.I, 2, 3)
    with named(recorder, device) as clock:
        assert clock is recorder
    with device.profile(tmp_path / "profile", name="rank-0"), named(recorder, device) as clock:
        assert clock is not recorder
        clock.add(action, clock.begin(action), 1.0)
    trace = json.loads((tmp_path / "profile" / "rank-0.json").read_text())
    assert [e["name"] for e in trace["traceEvents"]].count("action 2I3") == 1
    assert recorder.events[0][0] == action
