"""Each fact of Ascend, torch_npu and HCCL that the code relies on, and what would tell if it were
otherwise: a test, on the emulator where it can be seen there, or a row of the pre-flight table."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import pytest

from npu_pipe import build_schedule
from npu_pipe.launch.preflight import preflight

TESTS = Path(__file__).parents[1]

SHOWN_BY_TESTS = {
    "torch_npu works with torch of the same minor version only": (
        "gloo/test_device.py",
        "test_torch_npu_of_another_minor_version_is_refused_before_it_is_imported",
    ),
    "without CANN torch_npu does not load, and neither does torch unless told to": (
        "ascend/test_train_on_npu.py",
        "test_torch_npu_without_cann_trains_on_the_cpu_and_says_so_when_asked_for_the_npu",
    ),
    "each process has an NPU of its own, by its local rank": (
        "ascend/test_npu_schedules.py",
        "test_a_rank_without_an_npu_of_its_own_is_told_so",
    ),
    "send and recv make a communicator for each group and two ranks, with one stream": (
        "ascend/test_lanes.py",
        "test_each_transfer_uses_its_lanes_communicator_in_the_programs_order",
    ),
    "a send may wait until its receive is posted": (
        "ascend/test_npu_schedules.py",
        "test_every_schedule_gives_the_gradients_of_the_cpu",
    ),
    "a communicator is set up when it is first used, by both of its ranks together": (
        "ascend/test_device_faults.py",
        "test_a_rank_that_does_not_come_to_a_communicator_is_not_waited_for_in_the_library",
    ),
    "what is sent is contiguous": (
        "ascend/test_npu_schedules.py",
        "test_what_is_not_contiguous_is_sent_as_if_it_were",
    ),
    "bf16, fp16, fp32, whole numbers and booleans are sent, and complex numbers are not": (
        "ascend/test_npu_schedules.py",
        "test_each_type_that_hccl_sends_arrives_and_others_are_refused_before_it_is_asked",
    ),
    "an NPU has no doubles: they become floats": (
        "ascend/test_npu_schedules.py",
        "test_tensors_without_numbers_or_dimensions_cross_and_doubles_are_floats",
    ),
    "a transfer waits for the stream that it is issued under, and nothing else": (
        "ascend/test_running.py",
        "test_a_send_starts_when_its_own_value_is_there_whatever_computes_by_then",
    ),
    "work.wait has the stream wait, and not the host": (
        "ascend/test_running.py",
        "test_transfers_run_beside_compute_and_without_side_streams_they_do_not",
    ),
    "an event of the stream that reads a buffer is enough to use it again": (
        "ascend/test_running.py",
        "test_a_buffer_is_filled_again_only_after_the_device_has_read_it",
    ),
    "memory that is kept by rings and events does not grow, without record_stream": (
        "ascend/test_running.py",
        "test_memory_is_after_50_steps_what_it_was_at_the_start",
    ),
    "events tell when the device has passed them, on a clock of its own": (
        "ascend/test_running.py",
        "test_the_timeline_shows_when_things_ran_on_the_device_and_not_when_they_were_asked_for",
    ),
    "an event is passed by a stream whose work has failed; the communicator knows": (
        "ascend/test_device_faults.py",
        "test_an_error_of_hccl_on_one_rank_is_on_every_rank_ours_with_its_code",
    ),
    "and of a whole group, that adds gradients of replicas up": (
        "ascend/test_replicas_on_npu.py",
        "test_an_error_of_hccl_between_replicas_is_an_error_on_each",
    ),
    "the communicator of a whole group has buffers of HCCL_BUFFSIZE": (
        "ascend/test_replicas_on_npu.py",
        "test_two_replicas_train_with_the_losses_of_one_pipeline",
    ),
    "without P2P_HCCL_BUFFSIZE, which is 0 where it is empty, pairs share a communicator": (
        "ascend/test_lanes.py",
        "test_without_a_buffer_of_their_own_transfers_share_the_groups_communicator",
    ),
    "what fails in the queue is told once, and not always to us": (
        "ascend/test_replicas_on_npu.py",
        "test_an_error_of_hccl_between_replicas_is_an_error_on_each",
    ),
    "an operator that fails is told to who waits for its stream": (
        "ascend/test_device_faults.py",
        "test_what_else_fails_on_a_device_is_on_every_rank_ours_with_its_code",
    ),
    "a communicator that was broken off is made anew when it is next used": (
        "ascend/test_device_faults.py",
        "test_a_pipeline_trains_again_after_a_reset",
    ),
    "torch_npu ends the process when a peer is lost, unless it is told not to": (
        "ascend/test_device_faults.py",
        "test_a_rank_that_is_killed_is_missed_at_once",
    ),
    "a host that waits for its device is woken by aborting its communicators": (
        "ascend/test_device_faults.py",
        "test_a_stage_that_waits_for_its_device_itself_is_woken_too",
    ),
    "HCCL reads traffic class, service level, expansion mode and time-out from variables": (
        "gloo/test_device.py",
        "test_hccl_is_told_what_was_given_in_its_own_words",
    ),
    "P2P_HCCL_BUFFSIZE, and no option of a group, is the buffer of a communicator of two": (
        "ascend/test_train_on_npu.py",
        "test_verify_compares_on_the_npu_over_lanes_with_the_options_of_the_job",
    ),
    "NPUs have a random state of their own": (
        "ascend/test_train_on_npu.py",
        "test_a_checkpoint_holds_the_random_state_of_the_device_too",
    ),
    "mstx ranges with a stream are tasks of the device, which pp_chart draws by their words": (
        "ascend/test_marks.py",
        "test_each_action_is_a_range_on_the_stream_that_computes_as_pp_chart_reads_them",
    ),
    "EI0002, EI0006, ERR02200 and others say what they say": (
        "pure/test_explain.py",
        "test_an_error_of_the_library_is_told_with_code_place_meaning_and_its_own_words",
    ),
    "fused operators take fp16 and bf16 and k from 256 to 65534": (
        "ascend/test_fused_on_npu.py",
        "test_each_rule_is_told_before_the_operator_is_called",
    ),
    "on A2 they join 2, 4 or 8 ranks": (
        "ascend/test_fused_on_npu.py",
        "test_three_ranks_are_not_joined_on_a2",
    ),
    "on A2 all fused operators of a process use one communicator": (
        "ascend/test_fused_on_npu.py",
        "test_the_emulator_holds_the_rule_that_the_provider_keeps",
    ),
    "matmul with all-reduce is documented for A2 alone": (
        "ascend/test_fused_on_npu.py",
        "test_on_a3_the_sum_on_all_ranks_is_left_to_another_provider",
    ),
    "operators of a group know its communicator by the name that HCCL gives it": (
        "ascend/test_fused_on_npu.py",
        "test_products_are_those_of_the_whole_matrices",
    ),
    "the agents of torch_npu_run serve a store that torch_npu alone can talk to": (
        "ascend/test_torch_npu_run.py",
        "test_the_ranks_of_two_nodes_meet_at_the_store_of_the_first",
    ),
    "HCCL_CONNECT_TIMEOUT < HCCL_EXEC_TIMEOUT < HCCL_EVENT_TIMEOUT": (
        "pure/test_preflight.py",
        "test_what_is_out_of_bounds_is_refused_with_the_cure",
    ),
    "HCCL_IF_BASE_PORT and up is taken by the ranks of a host": (
        "pure/test_preflight.py",
        "test_a_port_that_another_process_listens_on_is_refused",
    ),
}

SHOWN_BEFORE_TRAINING = {
    "communicators have streams of their own, of STREAMS_PER_DEVICE": "streams",
    "a communicator has two buffers of P2P_HCCL_BUFFSIZE": "buffers",
    "HCCL uses ports from HCCL_IF_BASE_PORT up": "ports from 60000",
    "120, 1800 and 1868 seconds are the defaults of the time-outs": "connect 120 s, exec 1800 s",
}


@lru_cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fact", SHOWN_BY_TESTS)
def test_a_fact_that_the_code_relies_on_has_its_test(fact: str) -> None:
    path, name = SHOWN_BY_TESTS[fact]
    assert name in names_in(TESTS / path)


@pytest.mark.parametrize("fact", SHOWN_BEFORE_TRAINING)
def test_or_it_has_its_row_in_the_table_before_training(fact: str) -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    table = preflight(schedule, backend="hccl", local_rank=0, environ={})
    assert table is not None
    assert SHOWN_BEFORE_TRAINING[fact] in table
