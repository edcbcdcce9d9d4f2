"""Pipelines that share their layers fail together, with the right name, and go on together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

Get = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(200)
LIMIT_S = 2.0


@pytest.mark.parametrize(
    ("name", "fault", "rank", "action"),
    [
        ("zb-v", "raise", 2, "2I1"),
        ("zb-v", "raise", 3, "1W0"),
        ("1f1b", "raise", 2, "layer 1F0"),
        ("zb-v", "stall", 3, "layer 1F0"),
    ],
)
def test_all_pipelines_are_told_who_and_where_and_go_on_after_a_reset(
    cluster: Get, name: str, fault: str, rank: int, action: str, tmp_path: Path
) -> None:
    """A rank that waits for the rows of a stuck one is never blamed for it."""
    answers = cluster(4).values(
        "sharded_faults.goes_on_after",
        name=name,
        rank=rank,
        action=action,
        fault=fault,
        limit_s=LIMIT_S,
        note=str(tmp_path / "moment"),
        timeout_s=150,
    )
    assert len({loss for answer in answers for loss in answer["losses"]}) == 1
    assert len({answer["norm"] for answer in answers}) == 1
    where = action.removeprefix("layer ")
    for other, answer in enumerate(answers):
        assert len(answer["said"]) == 2
        for number, said in zip((2, 4), answer["said"], strict=True):
            if other == rank and fault == "raise":
                assert said["text"] == "ValueError: the injected fault"
                continue
            assert f"; rank {rank} " in said["text"], said["text"]
            assert f" in {where} of step {number} (stage {where[0]}, " in said["text"]
            assert said["seconds"] < 10
    tables = [table(answer) for answer in answers if answer["printed"]]
    assert len(tables) == (1 if fault == "stall" else 0)


def table(answer: dict[str, Any]) -> str:
    text: str = answer["printed"]
    assert "those that share its layers" in text
    return text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("another length", "HandshakeError: all ranks have the same form of the inputs"),
        ("no batch", "DataError: the inputs of a batch hold a tensor of (batch, ...); rank 1: "),
        ("another batch", "DataError: ranks that share layers are given the same batch; those of "),
    ],
)
def test_a_mistake_in_one_pipeline_is_refused_in_all_and_they_go_on(
    cluster: Get, kind: str, words: str
) -> None:
    answers = cluster(4).values("sharded_faults.mistaken", kind=kind, timeout_s=150)
    assert len({answer["said"] for answer in answers}) == 1
    for answer in answers:
        assert answer["said"].startswith(words)
        assert answer["loss"] == answers[0]["loss"]
        assert answer["places"] == [0, 1, 2, 3]
        assert answer["sum"] == 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("another schedule", "HandshakeError: all ranks have the same schedule; 1f1b"),
        (
            "another gain",
            "ConfigError: ranks that share layers begin with the same values of what is not cut; "
            "parameters of ranks 2, 3 differ",
        ),
        ("not told", "ConfigError: a pipeline knows the ranks that share its layers"),
    ],
)
def test_pipelines_that_do_not_fit_each_other_are_refused_before_anything_runs(
    cluster: Get, kind: str, words: str
) -> None:
    for answer in cluster(4).values("sharded_faults.mistaken", kind=kind, timeout_s=150):
        assert answer["said"].startswith(words)


def test_the_norm_is_one_and_scales_what_all_ranks_have_alike(cluster: Get) -> None:
    answers = cluster(4).values("sharded_faults.clips", max_norm=0.1, timeout_s=150)
    assert len({answer["norm"] for answer in answers}) == 1
    assert answers[0]["norm"] > 0.1
    for answer in answers:
        assert answer["again"] == pytest.approx(0.1, rel=1e-4)
    for first, second in ((0, 1), (2, 3)):
        assert answers[first]["gains"] == answers[second]["gains"], "bit by bit"
        assert answers[first]["gains"]


def test_a_rank_that_is_killed_within_a_layer_is_named_on_all_pipelines(
    cluster: Get, tmp_path: Path
) -> None:
    answers = cluster(4).survivors(
        "sharded_faults.killed", dead=2, rank=2, note=str(tmp_path / "moment"), timeout_s=150
    )
    assert len({answer.value["text"] for answer in answers}) == 1
    for answer in answers:
        assert (
            "rank 2 was killed (or its machine was lost) in 1F0 of step 2" in answer.value["text"]
        )
        assert answer.value["seconds"] < 10
