"""What crosses stages: each of these forms broke for users of other pipelines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster
from jobs.boundaries import FORMS

Get = Callable[[int], Cluster]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", FORMS)
def test_a_value_crosses_and_its_gradient_comes_back(cluster: Get, form: str) -> None:
    losses = cluster(2).values("boundaries.form_crosses", form=form)
    assert losses[0] == losses[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", FORMS)
def test_a_middle_stage_passes_it_on(cluster: Get, form: str) -> None:
    losses = cluster(3).values("boundaries.form_crosses", form=form, name="gpipe")
    assert len(set(losses)) == 1


@pytest.mark.timeout(60)
def test_a_stage_may_return_one_buffer_again_and_again(cluster: Get) -> None:
    """With other pipelines every loss became that of the last microbatch."""
    for ranks in (2, 3):
        assert len(set(cluster(ranks).values("boundaries.reused_buffer"))) == 1


@pytest.mark.timeout(60)
def test_shapes_change_from_step_to_step(cluster: Get) -> None:
    """torchtitan#431, pytorch#159942: the process aborted in C++."""
    losses = cluster(4).values("boundaries.shape_changes")
    assert losses[0][0] == losses[0][3], "the first shape again"


@pytest.mark.timeout(60)
def test_a_batch_that_requires_grad_is_data_all_the_same(cluster: Get) -> None:
    """Every microbatch's backward used to touch the whole batch."""
    assert len(set(cluster(2).values("boundaries.batch_needs_gradient"))) == 1


@pytest.mark.timeout(60)
def test_receive_buffers_do_not_grow_with_the_number_of_microbatches(cluster: Get) -> None:
    """pytorch#128910: m buffers were made where a few are in flight."""
    ranks, prefetch, many = 4, 2, 64
    arguments = {"microbatches": many, "link": "gloo_link"}
    for rank, found in enumerate(
        cluster(ranks).values("boundaries.buffers_in_flight", **arguments)
    ):
        assert found["left"] == found["held"] == 0
        forward = ranks - rank + prefetch if rank > 0 else 0
        backward = 1 + prefetch if rank < ranks - 1 else 0
        assert 0 < found["made"] <= forward + backward


@pytest.mark.timeout(60)
def test_shared_slots_do_not_grow_with_the_number_of_microbatches(cluster: Get) -> None:
    """What a rank has sent and nobody has released is bounded by what two ranks may hold;
    slots are made in slabs that double."""
    ranks, many = 4, 64
    arguments = {"microbatches": many, "link": "fastest_link"}
    for rank, found in enumerate(
        cluster(ranks).values("boundaries.buffers_in_flight", **arguments)
    ):
        assert found["left"] == found["held"] == 0
        assert 0 < found["made"] <= 2 * (2 * (ranks - rank) + 2)


@pytest.mark.timeout(60)
def test_more_messages_than_a_socket_holds_wait_in_the_sender(cluster: Get) -> None:
    found = cluster(2).values("boundaries.more_than_a_socket_holds", microbatches=2000)
    assert max(found) < 1e-12


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-v", "v-half"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_megabytes_are_copied_beside(cluster: Get, name: str, ranks: int) -> None:
    found = cluster(ranks).values("boundaries.megabytes", name=name, rows=2, width=1 << 16)
    assert max(found) < 1e-12
