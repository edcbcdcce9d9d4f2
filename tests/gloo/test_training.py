"""Law 6 and its neighbours: what a pipeline computes is what the unsplit model computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

from npu_pipe import build_schedule, simulate
from npu_pipe.simulator.costs import Costs

SCHEDULES = [("gpipe", None), ("1f1b", None), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_gradients_equal_the_unsplit_model_bit_for_bit(
    cluster: Callable[[int], Cluster], name: str, chunks: int | None, ranks: int
) -> None:
    for microbatches in sorted({1, max(1, ranks - 1), ranks, 2 * ranks, 4 * ranks}):
        answers = cluster(ranks).values(
            "training.gradients_equal_unsplit", name=name, chunks=chunks, microbatches=microbatches
        )
        losses = [answer["losses"] for answer in answers]
        assert losses == [losses[0]] * ranks, "the loss is the same number on every rank"
        schedule = build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        predicted = simulate(schedule, Costs.uniform(schedule.stages))
        for answer in answers:
            assert answer["measured"] == answer["wanted"], "law 10"
            assert tuple(answer["peaks"]) == predicted.peak_activations, "law 5"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_valid_tokens_normalise_the_window_and_not_each_microbatch(
    cluster: Callable[[int], Cluster], ranks: int
) -> None:
    """Third seed, section 05: the mean of the four means, 2.25, is not the loss per token."""
    answers = cluster(ranks).values(
        "training.token_losses", tokens=[8, 4, 8, 2], sums=[16, 12, 8, 6]
    )
    for answer in answers:
        assert answer["tokens"] == 42 / 22
        assert answer["mean"] == answer["a bare function"] == 2.25
        assert answer["sum"] == 42
    assert answers[0]["tokens gradient"] == pytest.approx(42 / 22, rel=1e-14)
    assert answers[0]["mean gradient"] == 2.25
    assert answers[0]["sum gradient"] == 42


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_windows_of_one_step_give_the_gradient_of_the_joined_batch(
    cluster: Callable[[int], Cluster], name: str
) -> None:
    losses = cluster(2).values("training.windows_join", name=name, windows=3)
    assert losses[0] == losses[1]
