"""From the emulator's trace: each lane has its own communicator and stream, used in the program's
order at both ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("1f1b", 2), ("interleaved-1f1b", 2), ("zb-v", 2), ("1f1b", 4), ("interleaved-1f1b", 4)],
)
def test_each_transfer_uses_its_lanes_communicator_in_the_programs_order(
    npus: Callable[..., Cluster], name: str, ranks: int
) -> None:
    microbatches = 2 * ranks
    answers = npus(ranks).values("traced.step", name=name, microbatches=microbatches)
    calls: dict[str, dict[str, list[int]]] = {}  # by communicator and kind
    for rank, answer in enumerate(answers):
        assert [[low, high] for _, (low, high) in answer["pairs"]] == [
            members for _, members, _ in answer["made"]
        ], "all communicators are made at the start, in one order"
        order = [comm for comm, _, _ in answer["made"]]
        lanes = {
            comm: f"{'down' if is_down else 'up'} {sum(pair) - rank}"
            for comm, (is_down, pair) in zip(order, answer["pairs"], strict=True)
        }
        streams = []
        for comm, used in answer["done"].items():
            assert used["calls"] == answer["wanted"].pop(lanes[comm]), (rank, lanes[comm])
            assert len(set(used["streams"])) == 1, "a communicator has a stream"
            streams.append(used["streams"][0])
            (kind,) = {kind for kind, _ in used["calls"]}  # one way only
            calls.setdefault(comm, {})[kind] = [size for _, size in used["calls"]]
        assert not answer["wanted"], "what the program says was done"
        assert len(set(streams)) == len(streams), "a stream has a communicator"
    for comm, ends in calls.items():
        assert ends["Send"] == ends["Recv"], (comm, "both ends have one order")


@pytest.mark.timeout(120)
def test_without_a_buffer_of_their_own_transfers_share_the_groups_communicator(
    npus: Callable[..., Cluster], tmp_path: Path
) -> None:
    """So what is empty is refused, before training, as 0 is."""
    for made in npus(2, trace_dir=tmp_path).values("traced.without_buffers"):
        assert made == [200, 200], "one a lane, with the buffers of HCCL_BUFFSIZE"
