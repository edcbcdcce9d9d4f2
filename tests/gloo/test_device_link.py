"""DeviceLink without a device: one that is made up, on the CPU, with gloo.

What it does with a real torch_npu, tests/ascend sees.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster import Cluster
from test_any_schedule import sizes_of

SENDS, RECEIVES = ("side 1", "side 2"), ("side 3", "side 4")  # by lane


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-zb", "dualpipe"])
def test_gradients_are_those_of_the_unsplit_model(
    cluster: Callable[[int], Cluster], name: str
) -> None:
    arguments = {"name": name, "microbatches": sizes_of(name, 2)[-1]}
    cluster(2).values("devices.train_named", **arguments)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_ranks_that_share_a_device_send_through_the_host(
    cluster: Callable[[int], Cluster], name: str
) -> None:
    cluster(2).values("devices.train_staged", name=name, microbatches=4)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_numbers_and_texts_go_beside_the_tensors(
    cluster: Callable[[int], Cluster], name: str
) -> None:
    found = cluster(2).values("devices.numbers", name=name, microbatches=4)
    stages = 4 if name == "zb-v" else 2
    last = 0 if name == "zb-v" else 1
    assert found[last] == [[stages, "ab" * stages]] * 4
    assert found[1 - last] == []


@pytest.mark.timeout(60)
def test_a_send_waits_for_what_it_sends_and_a_receive_for_the_reader_of_its_buffer(
    cluster: Callable[[int], Cluster],
) -> None:
    logs = cluster(2).values("devices.order_of_streams", microbatches=4)
    for log in logs:
        for at, (stream, what, _) in enumerate(log):
            if what == "issue" and stream in SENDS:
                assert log[at - 2 : at] == [
                    ["compute", "record", "compute"],
                    [stream, "wait", "compute"],
                ]
            if what == "issue" and stream in RECEIVES:
                assert log[at + 1] == [stream, "wait", "compute"]
        used = {stream for stream, what, _ in log if what == "issue"}
        assert len(used & set(SENDS)) == len(used & set(RECEIVES)) == 1, "one lane each way"


@pytest.mark.timeout(60)
def test_an_evaluation_in_inference_mode_leaves_buffers_that_training_can_use(
    cluster: Callable[[int], Cluster],
) -> None:
    cluster(2).values("devices.trains_after_inference", microbatches=4)
