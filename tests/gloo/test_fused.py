"""The fused products and their autograd functions equal the whole layer, on gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster

from npu_pipe_kernels.parity import SIZES
from npu_pipe_kernels.providers import providers

PROVIDERS = [each.name for each in providers() if each.kind in (None, "cpu")]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_products_are_those_of_the_whole_matrices(
    cluster: Callable[[int], Cluster], provider: str, dtype: str, ranks: int
) -> None:
    """Odd sizes, no rows, no columns; matrices that are transposed or have gaps."""
    arguments = {"provider": provider, "dtype": dtype}
    cluster(ranks).values("fused.products", **arguments, timeout_s=150)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("tiles", [1, 3, 9])
def test_any_number_of_tiles_gives_the_same(cluster: Callable[[int], Cluster], tiles: int) -> None:
    """Also more than there are rows."""
    arguments = {"provider": "portable", "dtype": "float32", "tiles": tiles}
    cluster(2).values("fused.products", **arguments, timeout_s=150)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_functions_have_the_gradients_of_the_whole_layer(
    cluster: Callable[[int], Cluster], provider: str, dtype: str, ranks: int
) -> None:
    arguments = {"provider": provider, "dtype": dtype, "sizes": SIZES}
    cluster(ranks).values("fused.functions", **arguments, timeout_s=150)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["x"], ["weight", "bias"], ["x", "bias"]])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(
    cluster: Callable[[int], Cluster], frozen: list[str]
) -> None:
    arguments = {"provider": "portable", "dtype": "float32", "sizes": SIZES[:2], "frozen": frozen}
    cluster(2).values("fused.functions", **arguments, timeout_s=150)


@pytest.mark.timeout(200)
def test_a_provider_for_another_device_is_refused_when_forced(
    cluster: Callable[[int], Cluster],
) -> None:
    for name, kind in (("npu", "npu"), ("cuda-symmetric-memory", "cuda")):
        arguments = {"provider": name, "dtype": "float32", "size": [2, 3, 4]}
        for answer in cluster(2).run("fused.refused", **arguments):
            assert answer.error == "ConfigError"
            assert f"it is for tensors on {kind}; these are on cpu" in answer.text
            assert "all_gather_matmul (2, 3) @ (3, 4) float32" in answer.text


@pytest.mark.timeout(200)
def test_the_table_says_who_was_chosen_and_why_not_the_others(
    cluster: Callable[[int], Cluster],
) -> None:
    first, second = cluster(2).values(
        "fused.chosen", dtype="float32", size=[2, 3, 4], timeout_s=150
    )
    assert first == second
    assert [row[1] for row in first] == ["portable"] * 3
    assert "not npu: it is for tensors on npu, and these are on cpu" in first[0][2]


@pytest.mark.timeout(200)
def test_rows_that_ranks_cannot_share_are_refused(cluster: Callable[[int], Cluster]) -> None:
    for answer in cluster(2).run("fused.uneven"):
        assert answer.error == "DataError"
        assert "3 rows on 2 ranks; pad the sequence so that the rows are 4" in answer.text


@pytest.mark.timeout(200)
def test_the_provider_of_the_page_is_one(cluster: Callable[[int], Cluster]) -> None:
    assert cluster(2).values("fused.as_documented") == [["serial"]] * 2


@pytest.mark.timeout(200)
def test_a_provider_that_is_wrong_is_found_out(cluster: Callable[[int], Cluster]) -> None:
    for sums, order in cluster(2).values("fused.wrong_ones"):
        assert sums == "True"
        assert "wrong, all_gather_matmul: gathered rows: they are not those of the ranks" in order
