"""Every schedule trains on device npu with backend hccl, and gives the gradients of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster
from test_any_schedule import sizes_of

from npu_pipe.schedules.registry import FAMILIES


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_gives_the_gradients_of_the_cpu(
    npus: Callable[..., Cluster], name: str, ranks: int
) -> None:
    """With rendezvous sends, which hang where an order is wrong, and free buffers full of NaN."""
    microbatches = sizes_of(name, ranks)[-1]
    cluster = npus(ranks)
    for answer in cluster.values("training.equals_cpu", name=name, microbatches=microbatches):
        assert answer["link"] == "DeviceLink"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_tied_copies_and_the_norm_of_all_gradients_are_those_of_the_cpu(
    npus: Callable[..., Cluster], name: str
) -> None:
    npus(2).values("training.tied_equals_cpu", name=name, microbatches=8)


@pytest.mark.timeout(120)
def test_one_rank_needs_no_lanes(npus: Callable[..., Cluster]) -> None:
    (answer,) = npus(1).values("training.equals_cpu", name="gpipe", microbatches=4)
    assert answer["link"] == "DeviceLink"


@pytest.mark.timeout(120)
def test_ranks_that_share_an_npu_send_through_the_host(npus: Callable[..., Cluster]) -> None:
    arguments = {"name": "zb-v", "microbatches": 4, "shared": True}
    for answer in npus(2).values("training.equals_cpu", **arguments):
        assert answer["link"] == "StagedLink"


@pytest.mark.timeout(120)
def test_a_script_for_torch_trains_on_npus_with_its_import_changed(
    npus: Callable[..., Cluster],
) -> None:
    for rank, told in enumerate(npus(2).values("torch_names.trains", microbatches=4)):
        assert f"given npu:{rank}, and has parameters on cpu; move it there first" in told


@pytest.mark.timeout(120)
def test_a_rank_without_an_npu_of_its_own_is_told_so(npus: Callable[..., Cluster]) -> None:
    (answer,) = npus(1).run("training.has_npu", index=8)
    assert answer.error == "ConfigError"
    assert "this is local rank 8, and 8 NPUs are visible" in answer.text


@pytest.mark.timeout(120)
def test_what_is_not_contiguous_is_sent_as_if_it_were(npus: Callable[..., Cluster]) -> None:
    """HCCL itself refuses it (ERR02002)."""
    npus(2).values("boundary.transposed", microbatches=4)


@pytest.mark.timeout(120)
def test_each_type_that_hccl_sends_arrives_and_others_are_refused_before_it_is_asked(
    npus: Callable[..., Cluster],
) -> None:
    cluster = npus(2)
    cluster.values("boundary.types", microbatches=2)
    first, second = cluster.run("boundary.complex_number", microbatches=2)
    assert (first.error, second.error) == ("DataError", "PeerError")
    assert "torch.complex64 on npu:0" in first.text


@pytest.mark.timeout(120)
def test_tensors_without_numbers_or_dimensions_cross_and_doubles_are_floats(
    npus: Callable[..., Cluster],
) -> None:
    npus(2).values("boundary.odd", microbatches=2)


@pytest.mark.timeout(120)
def test_what_was_left_on_the_host_is_refused_at_once(npus: Callable[..., Cluster]) -> None:
    """Its send would wait for a receive that the other end has given to its device."""
    first, second = npus(2).run("boundary.on_host", microbatches=2)
    assert (first.error, second.error) == ("DataError", "PeerError")
    assert "0SEND_F0 has a torch.float32 (2, 1) on cpu, and this rank's device is npu:0" in (
        first.text
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "v-half"])
def test_one_microbatch_is_enough(npus: Callable[..., Cluster], name: str) -> None:
    npus(2).values("training.equals_cpu", name=name, microbatches=1)
