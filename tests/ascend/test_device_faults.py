"""A rank that fails on its device takes the others along in time, with the cause."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

PLACE = "in 1F1 of step 2 (stage 1, forward of microbatch 1)"


@pytest.mark.timeout(120)
def test_an_error_on_one_rank_reaches_the_other_with_its_place(
    npus: Callable[..., Cluster],
) -> None:
    """And leaves both able to train: the next pipeline does."""
    cluster = npus(2)
    first, second = cluster.values("faults.fails", name="1f1b", kinds=["", "raise"], limit_s=20)
    assert (first["kind"], second["kind"]) == ("PeerError", "ValueError")
    assert f"rank 1 failed {PLACE}: ValueError: the stage is broken" in first["text"]
    assert first["seconds"] < 5
    cluster.values("training.equals_cpu", name="1f1b", microbatches=4)


@pytest.mark.timeout(120)
def test_a_rank_that_is_killed_is_missed_at_once(npus: Callable[..., Cluster]) -> None:
    cluster = npus(2)
    (left,) = cluster.survivors("faults.fails", dead=1, name="1f1b", kinds=["", "kill"], limit_s=20)
    assert left.value["kind"] == "PeerError"
    assert f"rank 1 was killed (or its machine was lost) {PLACE}" in left.value["text"]
    assert left.value["seconds"] < 5
    cluster.kill()


@pytest.mark.timeout(120)
def test_a_device_that_is_stuck_is_found_by_what_it_is_at_and_not_its_host(
    npus: Callable[..., Cluster],
) -> None:
    """The host of rank 1 has given all work to the device, and waits for it."""
    cluster = npus(2)
    answers = cluster.values("faults.fails", name="1f1b", kinds=["", "stuck device"], limit_s=2)
    for found in answers:
        assert found["kind"] == "PeerError"
        assert f"rank 1 has been {PLACE}" in found["text"]
        assert 2 < found["seconds"] < 10
    cluster.kill()


@pytest.mark.timeout(120)
def test_a_pipeline_trains_again_after_a_reset(npus: Callable[..., Cluster]) -> None:
    first, second = npus(2).values("faults.resets", name="1f1b")
    assert first == second


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["fail", "async"])
def test_an_error_of_hccl_on_one_rank_is_on_every_rank_ours_with_its_code(
    npus: Callable[..., Cluster], kind: str
) -> None:
    """In the call, or later on the stream, where no event tells of it."""
    cluster = npus(2, fault=f"rank=1,call=8,kind={kind},op=Send")
    answers = cluster.values("faults.fails", name="1f1b", kinds=["", ""], limit_s=20)
    cluster.kill()  # what is left of torch_npu in them is of no use
    for found in answers:
        assert found["kind"] == "PeerError", found
        assert "ERR02200" in found["text"], found
        assert "a call into HCCL failed" in found["text"]
        assert found["seconds"] < 10


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "kind", "code", "where"),
    [
        ("rank=0,call=2,kind=fail,op=Init", "", "ERR02200", "rank 0 was connecting to rank 1"),
        ("rank=1,call=12,kind=fail,op=Synchronize", "", "ERR00100", "rank 1 failed at the end of"),
        ("", "bad index", "ERR00100", "rank 0 failed at the end of step 2"),
    ],
)
def test_what_else_fails_on_a_device_is_on_every_rank_ours_with_its_code(
    npus: Callable[..., Cluster], fault: str, kind: str, code: str, where: str
) -> None:
    """Setting up a communicator; waiting for a stream; an operator, which no event tells of."""
    cluster = npus(2, fault=fault)
    answers = cluster.values("faults.fails", name="1f1b", kinds=[kind, ""], limit_s=20)
    cluster.kill()
    for found in answers:
        assert found["kind"] == "PeerError", found
        assert code in found["text"], found
        assert where in found["text"], found
        assert found["seconds"] < 10


@pytest.mark.timeout(120)
def test_what_hccl_cannot_run_with_is_refused_on_every_rank_before_it_is_asked(
    npus: Callable[..., Cluster],
) -> None:
    """Also where nobody but a program of one's own makes the pipeline."""
    settings = {
        "HCCL_EXEC_TIMEOUT": "100",
        "STREAMS_PER_DEVICE": "11",
        "HCCL_IF_BASE_PORT": "65536",
        "P2P_HCCL_BUFFSIZE": "9000",
        "HCCL_CONNECT_TIMEOUT": "two",
    }
    words = (
        "they are 120, 100, 1868 seconds; leave them",
        "needs 12, 2 of them for communicators, and STREAMS_PER_DEVICE is 11; set",
        "local rank 0 would use port 65536; set",
        "needs 36000 MB for 2, and ",
        "HCCL_CONNECT_TIMEOUT is 'two'; unset it",
    )
    for said in npus(2).values("faults.out_of_bounds", settings=settings):
        assert len(said) == len(words)
        assert all(wanted in text for wanted, text in zip(words, said, strict=True)), said


@pytest.mark.timeout(120)
def test_a_stage_that_waits_for_its_device_itself_is_woken_too(
    npus: Callable[..., Cluster],
) -> None:
    """Rank 1 asks for a value of its input, which rank 0 will never send."""
    cluster = npus(2)
    kinds = ["stuck host", "reads"]
    (found,) = cluster.survivors("faults.fails", dead=0, name="1f1b", kinds=kinds, limit_s=2)
    assert found.value["kind"] == "PeerError"
    assert "rank 0 has been in 0F1 of step 2" in found.value["text"]
    assert found.value["seconds"] < 10
    cluster.kill()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "told", "least_s"),
    [("kill", "rank 1 was killed", 0), ("stuck", "all ranks wait for each other", 6)],
)
def test_a_rank_that_does_not_come_to_a_communicator_is_not_waited_for_in_the_library(
    npus: Callable[..., Cluster], kind: str, told: str, least_s: float
) -> None:
    """HCCL would wait HCCL_CONNECT_TIMEOUT, two minutes; connect_s is 6 here."""
    cluster = npus(2)
    (left,) = cluster.survivors("faults.dies_connecting", dead=1, kind=kind)
    cluster.kill()
    assert left.value["kind"] == "PeerError", left.value
    assert told in left.value["text"]
    assert least_s <= left.value["seconds"] < least_s + 10
