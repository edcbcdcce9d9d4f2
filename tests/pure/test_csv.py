"""Files in the CSV form of torch.distributed.pipelining. torch itself reads and runs them in
tests/gloo/test_torch_runtime.py."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from core_helpers.random_cases import prefetch_for, random_schedule
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from npu_pipe import (
    build_schedule,
    check,
    load_program,
    load_schedule,
    lower,
    save_program,
    save_schedule,
)
from npu_pipe.errors import DeadlockError, ScheduleError
from npu_pipe.ir.csv_files import (
    program_from_csv,
    program_to_csv,
    schedule_from_csv,
    schedule_to_csv,
)

SCHEDULE = build_schedule("1f1b", ranks=2, microbatches=2)
TABLE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def read(text):
    return schedule_from_csv(text, name="1f1b")


def read_program(text):
    return program_from_csv(text, name="1f1b")


def test_a_schedule_is_a_table_with_one_row_a_rank(tmp_path):
    path = tmp_path / "1f1b.csv"
    save_schedule(SCHEDULE, path)
    assert path.read_text() == TABLE
    assert load_schedule(path) == SCHEDULE


def test_a_program_has_its_transfers_and_tells_torch_where_gradients_are_done(tmp_path):
    path = tmp_path / "1f1b.csv"
    save_program(lower(SCHEDULE), path)
    assert path.read_text() == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1REDUCE_GRAD,1SEND_B1\n"
    )
    assert load_program(path) == lower(SCHEDULE, prefetch=1)


@given(st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_every_schedule_with_one_rank_a_stage_survives(seed):
    schedule = random_schedule(Random(seed))
    assume(schedule.training and not schedule.mirrored)
    assert schedule_from_csv(schedule_to_csv(schedule), name="random") == schedule


@given(st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_every_program_survives_with_the_least_prefetch_that_will_do(seed):
    rng = Random(seed)
    schedule = random_schedule(rng)
    assume(schedule.training and not schedule.mirrored)
    program = lower(schedule, prefetch=prefetch_for(schedule, rng.randint(1, 4)))
    again = program_from_csv(program_to_csv(program), name="random")
    assert replace(again, prefetch=program.prefetch) == program
    check(again)
    if again.prefetch > 1:
        with pytest.raises(ScheduleError, match="at most prefetch"):
            check(replace(again, prefetch=again.prefetch - 1))


def test_blank_cells_are_idle_slots_and_rows_may_end_early():
    assert read("0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1,,,,\r\n") == SCHEDULE
    assert read('"0F0","0F1",,"0B0",0B1\n1F0,1B0,1F1,1B1') == SCHEDULE


def test_a_fused_pair_is_one_cell():
    text = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n"
    assert schedule_to_csv(read(text)) == text


def test_a_stage_lies_where_it_runs():
    assert read("1F0,1B0,2F0,2B0\n0F0,0B0\n".replace("1B0,2F0,2B0", "2F0,2B0,1B0")).placement == (
        1,
        0,
        0,
    )
    vee = build_schedule("1f1b", ranks=3, microbatches=4)
    table = schedule_to_csv(vee).split("\n")
    assert read("\n".join((table[2], table[0], table[1]))).placement == (1, 2, 0)


def test_notes_for_fsdp_are_skipped():
    """torch writes them into every table with transfers, and REDUCE_GRAD into 1F1B and GPipe."""
    notes = "0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD\n1F0,1B0,1F1,1B1,1REDUCE_GRAD\n"
    assert read(notes) == SCHEDULE


@pytest.mark.parametrize(
    ("text", "rank", "position", "action", "match"),
    [
        ("0F0,,zero,0B0\n", 0, 2, "zero", r"row 0 \(rank 0\) has 'zero' in column 2"),
        ("0F0,0B0\n1F0,1X0", 1, 1, "1X0", "row 1 .*without spaces"),
        ("0F0, 0B0\n", 0, 1, " 0B0", "without spaces"),
        ("0F0, \n", 0, 1, " ", "without spaces"),
        ("\ufeff0F0,0B0\n", 0, 0, "\ufeff0F0", "column 0"),
        ("0F0;0B0\n", 0, 0, "0F0;0B0", "column 0"),
        ("0F0,0B0,0UNSHARD1\n", 0, 2, "0UNSHARD1", "column 2"),
        ("0F0,0B0,UNSHARD\n", 0, 2, "UNSHARD", "column 2"),
        ("0F0,0B0,00RESHARD\n", 0, 2, "00RESHARD", "column 2"),
        ("0F0,0B0,1REDUCE_GRAD\n", 0, 2, "1REDUCE_GRAD", "the rank runs no such stage"),
        ("0F0,0B0,0SEND_F0\n", 0, 2, "0SEND_F0", "load_program reads files with transfers"),
        ("0F0,0B0,(0B0;0F1)OVERLAP_F_B\n", 0, 2, None, "one F and one B, in this order"),
        ("0F0,1F0,1B0,0B0\n0F1,1F1,1B1,0B1\n", 1, 0, "0F1", "a stage runs on one rank"),
        ("0F0,0B0\n2F0,2B0\n", None, None, None, "stage 1 runs on no rank"),
        ("0F0,0B0\n99999999999F0,99999999999B0\n", None, None, None, "stage 1 runs on no rank"),
        ("0F0,0B0\n\n", 1, None, None, "rank 1 holds none"),
        ("", None, None, None, "at least one rank"),
        ("0B0,0F0", 0, 0, "0B0", "stands after what it needs"),
        ("0B0\n", 0, None, "0F0", "0F0 is missing on rank 0"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", 1, None, "1I1", r"1I1 \(nor 1B1\) is missing on rank 1"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,1W1\n", 1, 3, "1B1", "both forms"),
        ("0F0,0B0\n1F0,1B0,1F0\n", 1, 2, "1F0", "more than once"),
        ('"0F0,0B0\n', None, None, None, "row 0: unexpected end of data"),
        ('"0F0"x,0B0\n', None, None, None, "row 0: ',' expected"),
    ],
)
def test_whatever_else_is_wrong_is_refused_by_its_place(text, rank, position, action, match):
    with pytest.raises(ScheduleError, match=match) as error:
        read(text)
    assert (error.value.rank, error.value.position) == (rank, position)
    assert action is None or error.value.action == action
    assert len(str(error.value)) < 500


def test_torchs_own_1f1b_table_is_refused():
    """Its last rank runs F1..Fm, here as torch 2.13 prints it for 2 ranks and 3 microbatches."""
    table = "0F0,0F1,0B0,0F2,0B1,0B2,0REDUCE_GRAD\n1F1,1B0,1F2,1B1,1F3,1B2,1REDUCE_GRAD\n"
    with pytest.raises(ScheduleError, match=r"microbatches 0\.\.2; rank 1 has 1F3") as error:
        read(table)
    assert (error.value.rank, error.value.position, error.value.action) == (1, 4, "1F3")


def test_ranks_that_wait_for_each_other_are_refused_with_the_circle():
    with pytest.raises(DeadlockError, match=r"rank 0 .* waits in 0B0 for 1B0 of rank 1"):
        read("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")


def test_transfers_that_would_hang_are_refused_with_the_circle_action_by_action():
    """Both send before they receive: fine while buffers last, a hang when they do not."""
    text = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    with pytest.raises(DeadlockError) as error:
        read_program(text)
    assert error.value.cycle == ((0, "0SEND_F1"), (1, "1SEND_B0"))
    assert (
        "rank 0 at position 3 waits in 0SEND_F1 for 1RECV_F1 of rank 1 at position 4, "
        "rank 1 at position 3 waits in 1SEND_B0 for 0RECV_B0 of rank 0 at position 4"
    ) in error.value.facts


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("0SEND_F1,", "", "0SEND_F1 is missing on rank 0"),
        ("1RECV_F0,1F0", "1F0,1RECV_F0", "1F0 at position 0: it needs 1RECV_F0"),
        ("0SEND_F0", "0SEND_F5", "0SEND_F5 at position 1: there is no such"),
        ("1RECV_F0", "0RECV_F0", "rank 1 has 0RECV_F0"),
        ("0F1,", "", "0F1 is missing on rank 0"),
    ],
)
def test_a_program_passes_the_same_checks(old, new, match):
    text = program_to_csv(lower(SCHEDULE))
    assert old in text
    with pytest.raises(ScheduleError, match=match):
        read_program(text.replace(old, new, 1))


def test_what_the_form_cannot_say_is_not_written(tmp_path):
    """A stage has one rank in it, and a backward."""
    forwards = tuple(tuple(a for a in order if a.kind == "F") for order in SCHEDULE.orders)
    evaluation = replace(SCHEDULE, orders=forwards, training=False)
    mirrored = replace(SCHEDULE, orders=SCHEDULE.orders[::-1], mirrored=(0, 1))
    for schedule in (evaluation, mirrored):
        check(schedule)
        for save in (
            lambda path, schedule=schedule: save_schedule(schedule, path),
            lambda path, schedule=schedule: save_program(lower(schedule), path),
        ):
            with pytest.raises(ScheduleError, match="one rank a stage, and backwards") as error:
                save(tmp_path / "one.csv")
            assert error.value.cure == "give a path that ends in .json"
            save(tmp_path / "one.json")
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


def test_a_table_of_forwards_only_lacks_its_backwards():
    with pytest.raises(ScheduleError, match=r"0I0 \(nor 0B0\) is missing"):
        read("0F0,0F1\n1F0,1F1\n")


@given(st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_damaged_bytes_are_refused_or_a_valid_schedule(seed):
    rng = Random(seed)
    data = bytearray(TABLE.encode())
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] = rng.choice(b'01239,"\r\n FBIW\0')
    try:
        schedule = read(data.decode())
    except ScheduleError:
        return
    check(schedule)


def test_a_large_file_comes_back(tmp_path):
    program = lower(build_schedule("interleaved-1f1b", ranks=64, microbatches=128))
    save_program(program, tmp_path / "large.csv")
    assert load_program(tmp_path / "large.csv").orders == program.orders
