"""The fused operators of torch_npu behind the layers, with the documented rules enforced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ascend_cluster import ascend_cluster
from cluster import Cluster

ODD = [[7, 257, 300], [1, 256, 256], [5, 300, 259]]
WIDE = {"dim": 512, "blocks": 3, "heads": 4, "hidden": 512, "vocabulary": 512}


@pytest.fixture
def fresh(emulator: tuple[Path, Path]) -> Iterator[Callable[..., Cluster]]:
    """fresh(p, **knobs): ranks that have not used a fused operator yet."""
    made: list[Cluster] = []

    def get(ranks: int, **knobs: object) -> Cluster:
        made.append(ascend_cluster(ranks, *emulator, knobs))
        return made[-1]

    yield get
    for each in made:
        each.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_products_are_those_of_the_whole_matrices(
    fresh: Callable[..., Cluster], ranks: int
) -> None:
    arguments = {"provider": "npu", "dtype": "bfloat16", "sizes": ODD}
    fresh(ranks).values("fused.products", **arguments, timeout_s=150)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("frozen", [[], ["weight"]])
def test_functions_have_the_gradients_of_the_whole_layer(
    fresh: Callable[..., Cluster], ranks: int, frozen: list[str]
) -> None:
    arguments = {"provider": "npu", "dtype": "bfloat16", "sizes": ODD, "frozen": frozen}
    for answer in fresh(ranks).values("fused.functions", **arguments, timeout_s=150):
        assert {row[1] for row in answer["rows"]} == {"npu"}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("provider", ["portable", "reference"])
def test_the_other_providers_run_over_hccl(fresh: Callable[..., Cluster], provider: str) -> None:
    """Direct exchange in batches, with rendezvous sends; float32 the operators refuse."""
    sizes = [[4, 8, 6], [7, 33, 5], [0, 5, 3]]
    arguments = {"provider": provider, "dtype": "float32", "sizes": sizes}
    cluster = fresh(4, link_latency_us=100)
    cluster.values("fused.products", **arguments, timeout_s=150)
    cluster.values("fused.functions", **arguments, timeout_s=150)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("keep", ["GATHERED", "OWN_ROWS"])
def test_zb_v_on_two_by_two_npus_gives_the_unsplit_gradients(
    fresh: Callable[..., Cluster], keep: str
) -> None:
    """All products fused, W apart, in bfloat16; against float64 of the same weights."""
    arguments = {"dtype": "bfloat16", "provider": "npu", "sizes": WIDE, "keep": keep, "limit": 0.04}
    for answer in fresh(4).values("fused.trains", **arguments, timeout_s=350):
        assert {row[1] for row in answer["rows"]} == {"npu"}


@pytest.mark.timeout(200)
def test_zb_v_in_float32_falls_back_and_is_as_exact(fresh: Callable[..., Cluster]) -> None:
    for answer in fresh(4).values("fused.trains", timeout_s=150):
        assert {row[1] for row in answer["rows"]} == {"portable"}
        assert "not npu: fused operators take float16 and bfloat16" in answer["rows"][0][2]


@pytest.mark.timeout(200)
def test_each_rule_is_told_before_the_operator_is_called(fresh: Callable[..., Cluster]) -> None:
    cluster = fresh(2)
    for dtype, size, words in (
        ("float32", [4, 256, 8], "take float16 and bfloat16; the matrices are float32"),
        ("bfloat16", [4, 255, 8], "have k from 256 to 65534; k is 255"),
        ("bfloat16", [4, 65535, 1], "k is 65535"),
        ("bfloat16", [0, 256, 8], "that hold something; they are (0, 256) and (256, 8)"),
    ):
        for answer in cluster.run("fused.refused", provider="npu", dtype=dtype, size=size):
            assert answer.error == "ConfigError", answer.trace
            assert words in answer.text


@pytest.mark.timeout(200)
def test_three_ranks_are_not_joined_on_a2(fresh: Callable[..., Cluster]) -> None:
    (first, *_) = fresh(3).values("fused.chosen", dtype="bfloat16", size=[3, 256, 8])
    assert [row[1] for row in first] == ["portable"] * 3
    assert "on Atlas A2 fused operators join 2, 4, 8 ranks, and these are 3" in first[0][2]


@pytest.mark.timeout(200)
def test_on_a3_the_sum_on_all_ranks_is_left_to_another_provider(
    fresh: Callable[..., Cluster],
) -> None:
    cluster = fresh(2, soc="Ascend910_9392")
    (first, *_) = cluster.values("fused.chosen", dtype="bfloat16", size=[4, 256, 8])
    assert [row[1] for row in first] == ["npu", "npu", "portable"]
    assert "documented for Atlas A2, and this is Atlas A3" in first[2][2]


@pytest.mark.timeout(200)
def test_a_second_group_on_a2_is_served_by_another_provider(fresh: Callable[..., Cluster]) -> None:
    for answer in fresh(2).values("fused.two_groups", size=[4, 256, 8], timeout_s=150):
        assert [row[1] for row in answer] == ["npu", "portable"]
        assert "all fused operators of a process use one communicator" in answer[1][2]


@pytest.mark.timeout(200)
def test_the_emulator_holds_the_rule_that_the_provider_keeps(
    fresh: Callable[..., Cluster],
) -> None:
    """Who makes the providers twice gets around the provider, and the operator fails."""
    for answer in fresh(2).run("fused.breaks_the_rule", size=[4, 256, 8]):
        assert answer.error is not None
        assert "one communicator" in answer.text, answer.trace


@pytest.mark.timeout(200)
def test_a_rank_that_fails_ends_the_pipelines_on_all_sides_of_it_for_good(
    fresh: Callable[..., Cluster],
) -> None:
    """The emulator's communicators fail at both ends, as those of a real HCCL may not."""
    answers = fresh(4).values("fused.one_fails", rank=2, timeout_s=150)
    kinds = [answer["kind"] for answer in answers]
    assert kinds.pop(2) == "ValueError"
    assert kinds == ["PeerError"] * 3, answers
    assert max(answer["seconds"] for answer in answers) < 60
    for answer in answers:
        said = "knows no other; start the job anew, from its last checkpoint"
        assert answer["reset"].endswith(said), answer


@pytest.mark.timeout(200)
def test_a_sum_over_those_that_share_layers_that_fails_is_told_on_all_of_them(
    fresh: Callable[..., Cluster],
) -> None:
    cluster = fresh(2, fault="rank=1,kind=async,op=AllReduce,call=4")
    for answer in cluster.values("fused.one_fails", rank=-1, timeout_s=150):
        assert answer["kind"] == "PeerError", answer
        assert "ERR02200" in answer["text"], answer
        assert answer["seconds"] < 10
