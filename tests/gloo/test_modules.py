"""What users' modules do: it works as in the unsplit model, or is refused with its name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from cluster import Cluster
from jobs.modules import FORMS

Get = Callable[[int], Cluster]

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_cross_is_refused_by_its_sender_in_no_time(cluster: Get, form: str) -> None:
    """A tensor without data used to be waited for until the time-out."""
    first, second = cluster(2).run("modules.refused_form", form=form, timeout_s=9)
    assert first.error == "DataError"
    assert second.error == "PeerError"
    assert f"DataError: {first.text}" in second.text


def test_an_output_that_is_overwritten_before_it_was_sent_is_told(cluster: Get) -> None:
    """The loss was silently that of later microbatches."""
    first, second = cluster(2).run("modules.buffers_take_turns", link="gloo_link", timeout_s=20)
    assert first.error == "DataError"
    assert "stage 0 has written to an earlier output" in first.text
    assert second.error == "PeerError"
    assert first.text in second.text


def test_in_shared_memory_an_output_is_sent_when_it_is_made(cluster: Get) -> None:
    found = cluster(2).values("modules.buffers_take_turns", link="fastest_link")
    assert max(found) < 1e-12


@pytest.mark.parametrize("count", [1, 2, 3])
def test_large_outputs_may_take_turns(cluster: Get, count: int) -> None:
    """Whether this was refused depended on how far the thread was that copies them."""
    assert max(cluster(2).values("modules.large_buffers_take_turns", count=count)) < 1e-12


def test_what_neither_of_two_replicas_has_used_has_no_gradient(cluster: Get) -> None:
    """It had one of zeros, and an optimizer with weight decay moved it."""
    for found in cluster(2).values("modules.unused_in_two_replicas"):
        assert all(ours == unsplit for ours, unsplit in found)
        assert not found[0][0]


def test_the_first_stage_may_work_on_its_input_in_place(cluster: Get) -> None:
    """The microbatches are views of one batch; autograd took each change for one of all."""
    assert len(set(cluster(2).values("modules.input_changed_in_place"))) == 1


def test_a_parameter_that_stages_share_counts_and_is_clipped_once(cluster: Get) -> None:
    for norm, clipped, by_hand in cluster(2).values("modules.shared_parameters"):
        assert math.isclose(norm, by_hand)
        assert math.isclose(clipped, by_hand, rel_tol=1e-4)


def test_a_parameter_that_stages_of_two_replicas_share_counts_once(cluster: Get) -> None:
    """It counted as one of the first stage on one rank, and as one of the last on the other."""
    for norm, wanted in cluster(2).values("modules.shared_in_replicas"):
        assert math.isclose(norm, wanted)


@pytest.mark.parametrize("link", ["fastest_link", "gloo_link"])
def test_the_default_device_of_tensors_may_be_another(cluster: Get, link: str) -> None:
    """`torch.set_default_device` says where a model is made; what ranks tell each other of lies on
    the host all the same."""
    for step, evaluation, unsplit in cluster(2).values("modules.made_on_another_device", link=link):
        assert math.isclose(step, unsplit)
        assert math.isclose(evaluation, unsplit)


def test_complex_gradients_count_with_both_parts(cluster: Get) -> None:
    for norm, wanted in cluster(2).values("modules.complex_parameters"):
        assert math.isclose(norm, wanted)


def test_a_stage_may_be_unfrozen_between_two_steps(cluster: Get) -> None:
    first, second = cluster(2).values("modules.first_stage_is_unfrozen")
    assert first == [False, True, False]
    assert second == [True, True, True]


def test_a_stage_may_return_another_form_in_another_mode(cluster: Get) -> None:
    losses = cluster(2).values("modules.mode_changes")
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1


def test_running_statistics_count_each_microbatch_once(cluster: Get) -> None:
    assert cluster(2).values("modules.statistics") == [[0, 4, 4]] * 2


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-v", 2)])
def test_a_step_within_autocast_runs_its_backwards_outside(
    cluster: Get, name: str, chunks: int
) -> None:
    """They lost the precision of layers that had left autocast."""
    assert cluster(2).values("modules.within_autocast", name=name, chunks=chunks) == [0.0, 0.0]


def test_forms_are_not_remembered_for_ever(cluster: Get) -> None:
    assert cluster(2).values("modules.every_batch_has_a_new_shape") == [64, 64]


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, 1e300])
def test_a_time_out_that_is_none_is_refused(cluster: Get, seconds: float) -> None:
    for text in cluster(2).values("modules.bad_time_out", seconds=seconds):
        assert text.startswith("timeout_s is more than 0")
