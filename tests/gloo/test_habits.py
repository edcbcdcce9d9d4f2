"""Parallel layers in the ways in which people use layers, many at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster
from test_fused import PROVIDERS


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_layers_equal_the_whole_one_however_they_are_used(
    cluster: Callable[[int], Cluster], provider: str, dtype: str, ranks: int
) -> None:
    """Any shape and strides, frozen, tied, used twice, hooked, under checkpointing, with main_grad;
    with W apart or not."""
    arguments = {"provider": provider, "dtype": dtype, "seed": ranks, "count": 120}
    for wrong in cluster(ranks).values("habits.habits", **arguments, timeout_s=150):
        assert not wrong, "\n".join(wrong)
