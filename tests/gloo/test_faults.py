"""Whatever is wrong is told on every rank, with one message, and nothing hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from cluster import Cluster

from npu_pipe.comm import meeting

Get = Callable[[int], Cluster]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("fact", "values"),
    [
        ("schedule", ("1f1b", "gpipe")),
        ("number of microbatches", ("4", "6")),
        ("loss", ("MeanLoss", "SumLoss")),
        ("prefetch", ("2", "3")),
    ],
)
def test_ranks_that_disagree_are_named_with_both_values(
    cluster: Get, fact: str, values: tuple[str, str]
) -> None:
    for odd in (0, 2):
        ranks = cluster(3)
        start = time.monotonic()
        answers = ranks.run("faults.ranks_differ", fact=fact, odd=odd, timeout_s=20)
        assert time.monotonic() - start < 5
        for answer in answers:
            assert answer.error == "HandshakeError"
            assert f"the same {fact}" in answer.text
            assert all(value in answer.text for value in values)
            assert f"on rank {odd}" in answer.text
        assert len({answer.text for answer in answers}) == 1


@pytest.mark.timeout(60)
def test_a_rank_with_the_wrong_stages_is_named_on_every_rank(cluster: Get) -> None:
    for answer in cluster(2).run("faults.wrong_stages"):
        assert answer.error == "ConfigError"
        assert "rank 1: it was given stages [0], and holds [1]" in answer.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        ("fewer rows than microbatches", 0),
        ("fewer targets than microbatches", 2),
        ("targets of other rows", 2),
        ("targets of half the rows", 2),
        ("twice as many targets", 2),
        ("no tensor", 0),
        ("tensors of different rows", 0),
        ("not a pair", 0),
        ("zero rows", 0),
        ("a sparse tensor", 0),
    ],
)
def test_a_bad_batch_is_refused_everywhere_and_the_next_one_runs(
    cluster: Get, kind: str, rank: int
) -> None:
    """pytorch#126600: ten rows in four microbatches gave twelve rows back, two of them stale."""
    answers = cluster(3).values("faults.bad_batch", kind=kind)
    assert answers == [answers[0]] * 3
    refused, ran = answers[0]
    assert refused.startswith("DataError")
    assert f"rank {rank}: " in refused
    assert ran.startswith("loss ")


@pytest.mark.timeout(60)
def test_a_step_without_a_valid_token_has_no_loss(cluster: Get) -> None:
    for answer in cluster(2).run("faults.no_valid_token"):
        assert answer.error == "DataError"
        assert "the number of valid tokens in this step is 0" in answer.text


@pytest.mark.timeout(60)
def test_ranks_that_call_different_things_are_told(cluster: Get) -> None:
    for answer in cluster(3).run("faults.calls_differ", odd=1):
        assert answer.error == "HandshakeError"
        assert "the same call; step on ranks 0, 2, but evaluate on rank 1" in answer.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("calls", [1, 3, 8])
def test_an_exception_in_one_stage_reaches_every_rank_with_its_cause(
    cluster: Get, rank: int, calls: int
) -> None:
    """Peers of other pipelines sit until the process group's time-out, without a cause."""
    answers = cluster(4).run("faults.stage_raises", rank=rank, calls=calls, timeout_s=10)
    assert answers[rank].error == "ValueError"
    for other in {0, 1, 2, 3} - {rank}:
        assert answers[other].error == "PeerError"
        assert f"rank {rank} failed in {rank}F{calls - 1}" in answers[other].text
        assert "ValueError: the third forward is broken" in answers[other].text


@pytest.mark.timeout(60)
def test_a_rank_that_fails_before_a_step_takes_the_others_along_to_the_next(cluster: Get) -> None:
    """It used to be a step ahead of them ever after: inputs of one batch met targets of another."""
    first, last = cluster(2).values("faults.count_raises_once")
    assert last[0] == "the first count is broken"
    assert "rank 1 failed in step: TypeError: the first count is broken" in first[0]
    assert first[1:] == last[1:]
    assert all(isinstance(loss, float) for loss in first[1:])


@pytest.mark.timeout(60)
def test_a_rank_that_is_interrupted_before_a_step_takes_the_others_along_too(cluster: Get) -> None:
    """Only what is an Exception was told; the others waited, and met it a step later."""
    first, last = cluster(2).values("faults.interrupted_at_its_batch")
    assert last[0] == "KeyboardInterrupt: "
    assert "rank 1 failed in step: KeyboardInterrupt" in first[0]
    assert first[1:] == last[1:]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["stage", "batch"])
def test_an_error_whose_text_cannot_be_made_is_told_by_its_name(cluster: Get, where: str) -> None:
    """What its `str` raised came out of the telling: nobody was told, and all waited."""
    first, last = cluster(2).values("faults.wordless", where=where, timeout_s=9)
    assert last[0] == "WordlessError"
    assert "WordlessError: (its text could not be made: TypeError)" in first[0]
    assert first[1] == last[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ["evaluate", "predict", "gather", "clip_gradients", "nothing"])
def test_the_cause_is_told_whatever_was_called(cluster: Get, call: str) -> None:
    answers = cluster(3).run("faults.call_raises", call=call, rank=2, stays=False, timeout_s=9)
    cause = answers[2]
    assert cause.error in ("ValueError", "TypeError")
    for answer in answers[:2]:
        assert answer.error == "PeerError"
        assert "rank 2 failed" in answer.text
        assert f"{cause.error}: {cause.text}" in answer.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ["evaluate", "gather", "clip_gradients"])
def test_a_rank_that_fails_and_lives_on_is_not_waited_for(cluster: Get, call: str) -> None:
    answers = cluster(3).values("faults.call_raises", call=call, rank=0, stays=True, timeout_s=20)
    for answer in answers[1:]:
        assert answer.startswith("PeerError")
        assert "rank 0 failed" in answer


@pytest.mark.timeout(60)
def test_a_loss_function_that_gives_no_scalar_is_named(cluster: Get) -> None:
    first, last = cluster(2).run("faults.loss_is_no_scalar")
    assert last.error == "DataError"
    assert "it is a tensor of (2, 6)" in last.text
    assert first.error == "PeerError"
    assert "it is a tensor of (2, 6)" in first.text


@pytest.mark.timeout(60)
def test_a_new_pipeline_works_after_one_that_failed(cluster: Get) -> None:
    losses = cluster(3).values("faults.works_after_a_failure")
    assert len(set(losses)) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_ends_the_step_of_all_others_in_seconds(cluster: Get, rank: int) -> None:
    ranks = cluster(4)
    answers = ranks.survivors("faults.killed", dead=rank, rank=rank, timeout_s=40)
    assert [answer.value for answer in answers] == ["PeerError"] * 3
    ranks.kill()


@pytest.mark.timeout(60)
def test_a_killed_rank_is_missed_though_its_data_workers_live_on(cluster: Get) -> None:
    """They had its connections: seconds passed before anybody noticed."""
    ranks = cluster(2)
    (answer,) = ranks.survivors("faults.killed_with_a_worker", dead=1, timeout_s=40)
    ranks.kill()
    seconds, told = answer.value
    assert seconds < 3
    assert "rank 1 was killed" in told


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rank", [-1, 1])
def test_a_step_without_gradients_is_refused_on_every_rank(cluster: Get, rank: int) -> None:
    """It ended in a KeyError of the first backward."""
    said = cluster(2).values("faults.gradients_are_off", rank=rank)
    assert said[0] == said[1]
    assert len(said[0]) == 2
    assert all(each.startswith("ConfigError: a step computes gradients") for each in said[0])


@pytest.mark.timeout(60)
def test_a_store_whose_rank_is_stopped_is_not_waited_for() -> None:
    """A call to it never returns, whatever time-out it was given."""
    answer = threading.Event()
    with pytest.raises(RuntimeError, match="no answer within"):
        meeting.patiently(answer.wait, 0.05)
    answer.set()
    assert meeting.patiently(answer.wait, 5)


@pytest.mark.timeout(60)
def test_a_rank_that_never_calls_step_is_waited_for_as_long_as_asked(cluster: Get) -> None:
    answers = cluster(3).run("faults.never_comes", rank=1, timeout_s=20)
    assert answers[1].value == "was away"
    for other in (0, 2):
        assert answers[other].error == "PeerError"
        assert "rank 1 has not called step 1" in answers[other].text


@pytest.mark.timeout(60)
def test_a_rank_that_takes_longer_where_that_was_said_is_waited_for(cluster: Get) -> None:
    losses = cluster(3).values("faults.waited_for", rank=1)
    assert losses == [losses[0]] * 3


@pytest.mark.timeout(60)
def test_a_stage_that_calls_its_own_pipeline_is_told(cluster: Get) -> None:
    """All ranks waited for each other until the time-out."""
    first, last = cluster(2).run("faults.calls_in_calls", timeout_s=20)
    assert last.error == "RunError"
    assert "one call at a time; evaluate was called in the middle of step 1" in last.text
    assert "rank 1 failed in 1F0 of step 1" in first.text


@pytest.mark.timeout(60)
def test_two_threads_do_not_call_at_once(cluster: Get) -> None:
    """One of them took the other's transfers: IndexError, KeyError, or a wrong loss."""
    for refused, ran in cluster(2).values("faults.calls_from_two_threads"):
        assert "one call at a time; evaluate was called in the middle of step 1" in refused
        assert ran.startswith("loss ")
