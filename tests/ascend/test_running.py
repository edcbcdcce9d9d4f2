"""What a step on a device costs: memory, and the time of its transfers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

MICROBATCHES = 8
# Sleeping, so that no core is needed; long, so that a busy machine makes no difference.
BUSY_S = 0.05  # of each stage, for each microbatch
LATENCY_S = 0.05  # of each transfer


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_memory_is_after_50_steps_what_it_was_at_the_start(
    npus: Callable[..., Cluster], name: str
) -> None:
    arguments = {"name": name, "microbatches": 4, "steps": 50}
    cluster = npus(2)
    for found in cluster.values("memory.after_steps", **arguments):
        assert found["last"] == found["third"], found
        assert found["reserved, last"] == found["reserved, third"], found
        assert found["buffers, last"] == found["buffers, third"], found
        assert found["after"] == found["before"], found


@pytest.mark.timeout(120)
def test_transfers_run_beside_compute_and_without_side_streams_they_do_not(
    npus: Callable[..., Cluster],
) -> None:
    """A forward of two ranks: m + 1 times a stage and one transfer, if all others are hidden."""
    cluster = npus(2, link_latency_us=round(LATENCY_S * 1e6))
    arguments = {"microbatches": MICROBATCHES, "busy_s": BUSY_S}
    hidden_s = (MICROBATCHES + 1) * BUSY_S + LATENCY_S
    in_line_s = hidden_s + (MICROBATCHES - 1) * LATENCY_S
    beside = [max(cluster.values("overlap.evaluate", beside=True, **arguments)) for _ in range(3)]
    in_line = [max(cluster.values("overlap.evaluate", beside=False, **arguments)) for _ in range(3)]
    assert hidden_s < min(beside) < (hidden_s + in_line_s) / 2, (beside, hidden_s)
    assert min(in_line) > in_line_s, (in_line, in_line_s)


@pytest.mark.timeout(120)
def test_a_buffer_is_filled_again_only_after_the_device_has_read_it(
    npus: Callable[..., Cluster],
) -> None:
    npus(2).values("overlap.late_reader", microbatches=MICROBATCHES, busy_s=BUSY_S)


@pytest.mark.timeout(120)
def test_a_send_starts_when_its_own_value_is_there_whatever_computes_by_then(
    npus: Callable[..., Cluster],
) -> None:
    """Rank 0 is given forward after forward. If a send were issued after the next of them, it would
    wait for that: so the test can fail."""
    cluster = npus(2, link_latency_us=round(LATENCY_S * 1e6))
    arguments = {"microbatches": 4, "busy_s": BUSY_S}
    at_once, late = (
        cluster.values("overlap.sends", late=late, **arguments)[0] for late in (False, True)
    )
    assert len(at_once) == len(late) == 3
    assert max(at_once) < BUSY_S / 2 < BUSY_S * 0.9 < min(late)


@pytest.mark.timeout(120)
def test_the_timeline_shows_when_things_ran_on_the_device_and_not_when_they_were_asked_for(
    npus: Callable[..., Cluster],
) -> None:
    """The host asks for all of a step in the time of a few actions."""
    cluster = npus(2, link_latency_us=round(LATENCY_S * 1e6))
    found = cluster.values("overlap.timeline", microbatches=4, busy_s=BUSY_S)[0]
    compute = {action: (start, end) for action, start, end in found["compute"]}
    assert len(compute) == 16
    for action, (start, end) in compute.items():
        assert BUSY_S <= end - start < 3 * BUSY_S, (action, end - start)
    for action, start, end in found["transfers"]:
        assert end - start >= LATENCY_S * 0.9, (action, end - start)
        if "RECV_F" in action:  # what came was used after it had come
            assert end <= compute[action.replace("RECV_F", "F")][0] + 1e-3
    last = max(end for _, end in compute.values())
    assert last == pytest.approx(found["took"], rel=0.3)
    assert all(BUSY_S <= seconds < 3 * BUSY_S for seconds in found["optimizer"])
    assert len(found["optimizer"]) == 2
