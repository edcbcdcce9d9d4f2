"""What a rank has been given stays what it was, though its memory is used again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cluster import Cluster
from jobs.buffers import PASSES_ON
from torch import Tensor, nn

from npu_pipe.comm.ring import Ring, Rings
from npu_pipe.errors import DataError
from npu_pipe.runtime.boundary import TensorMeta, flatten_local
from npu_pipe.runtime.stage import Stage

Get = Callable[[int], Cluster]

LINKS = ["fastest_link", "gloo_link"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("case", PASSES_ON)
def test_outputs_that_are_the_received_input_stay(cluster: Get, case: str, link: str) -> None:
    """A dropout in evaluation, say, returns its input: predictions became later ones'."""
    nothing, differences = cluster(2).values("buffers.outputs_are_kept", case=case, link=link)
    assert nothing == []
    assert differences == [0.0] * 4


@pytest.mark.timeout(60)
@pytest.mark.parametrize("link", LINKS)
def test_training_goes_on_after_an_evaluation_in_inference_mode(cluster: Get, link: str) -> None:
    losses = cluster(2).values("buffers.evaluated_in_inference_mode", link=link)
    assert len(set(losses[0] + losses[1])) == 1


@pytest.mark.timeout(60)
def test_shared_memory_takes_no_file_descriptors(cluster: Get) -> None:
    """A job with a limit of 64 would soon have had none left."""
    for counts in cluster(2).values("buffers.open_files"):
        assert counts[-1] <= counts[0]


@pytest.mark.timeout(60)
def test_a_rank_may_have_more_open_files_than_select_knows(cluster: Get) -> None:
    losses = cluster(2).values("buffers.many_open_files")
    assert losses[0] == losses[1]


def test_buffers_of_other_shapes_are_kept_by_their_bytes() -> None:
    """Thirty-two of them were, of whatever size."""
    rings: Rings[Ring] = Rings()

    def window(nbytes: int) -> None:
        rings.start_window()
        meta = TensorMeta((nbytes,), torch.uint8, False)
        ring = rings.get(nbytes, lambda: Ring([meta], poison=False))
        ring.put(ring.get())

    for number in range(9):
        window((40 << 20) + number)
    assert rings.made <= 3
    for number in range(100):
        window(1000 + number)
    assert rings.made >= 100
    before = rings.made
    window(1000)
    assert rings.made == before


def test_an_output_that_is_written_to_while_it_is_sent_is_told_though_it_has_gone_since() -> None:
    """What was sent is a mixture of two outputs then, and nobody would know."""
    under_way: list[Tensor] = []

    class TakesTurns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.buffers_by_turn = [torch.zeros(2), torch.zeros(2)]
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 4:
                under_way.clear()  # the copier has come to the end of the second
            return self.buffers_by_turn[self.calls % 2].copy_(x)

    stage = Stage(0, TakesTurns())
    meta, tensors = flatten_local(torch.ones(2))
    with torch.no_grad():
        for microbatch in range(3):
            under_way.extend(stage.leaving([stage.forward(microbatch, meta, tensors)]))
        with pytest.raises(DataError, match="stage 0 has written to an earlier output"):
            stage.forward(3, meta, tensors)
