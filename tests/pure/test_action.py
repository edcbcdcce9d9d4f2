"""The text form of actions: exactly that of torch.distributed.pipelining, and nothing more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Action, FusedPair, Kind, flatten, parse_step

numbers = st.integers(0, 10**18 - 1)
actions = st.builds(Action, st.sampled_from(Kind), numbers, numbers)
pairs = st.builds(
    FusedPair,
    st.builds(Action, st.just(Kind.F), numbers, numbers),
    st.builds(Action, st.just(Kind.B), numbers, numbers),
)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Action(Kind.F, 2, 0), "2F0"),
        (Action(Kind.B, 0, 11), "0B11"),
        (Action(Kind.I, 2, 0), "2I0"),
        (Action(Kind.W, 10, 0), "10W0"),
        (Action(Kind.SEND_F, 1, 3), "1SEND_F3"),
        (Action(Kind.RECV_F, 2, 3), "2RECV_F3"),
        (Action(Kind.SEND_B, 2, 3), "2SEND_B3"),
        (Action(Kind.RECV_B, 1, 3), "1RECV_B3"),
        (FusedPair(Action(Kind.F, 0, 7), Action(Kind.B, 7, 3)), "(0F7;7B3)OVERLAP_F_B"),
    ],
)
def test_the_text_of_a_step_is_the_one_in_the_design(step, text):
    assert str(step) == text
    assert parse_step(text) == step
    assert type(parse_step(text)) is type(step)


@given(actions | pairs)
@settings(derandomize=True, deadline=None)
def test_every_step_survives_its_text(step):
    assert parse_step(str(step)) == step


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "0F0junk",
        "junk0F0",
        "0F-1",
        "-1F0",
        "+1F0",
        "0FORWARD0",
        "0f0",
        "00F0",
        "0F00",
        "01F0",
        "0F01",
        " 0F0",
        "0F0 ",
        "0 F0",
        "0F0\n",
        "\n0F0",
        "0F0\r",
        "0F0\t",
        "0F0\0",
        "0F",
        "F0",
        "F",
        "00",
        "0X0",
        "0FB0",
        "0F0F0",
        "0F0.0",
        "0F1e3",
        "0F0x1",
        "0F1_000",
        "\u0660F\u0660",  # Arabic-Indic zero
        "0F\u0661",
        "0F\u00b2",  # superscript two
        "\uff10F0",  # full-width zero
        "0\uff260",  # full-width F
        "0\u0424" + "0",  # Cyrillic ef
        "0SEND0",
        "0SEND_F",
        "0RECV_W0",
        "0send_f0",
        "0SEND-F0",
        "0UNSHARD",
        "0F" + "9" * 19,
        "0F" + "9" * 5000,  # more digits than int() takes
        "(0F0;0B1)",
        "(0F0;0B1)OVERLAP_F_B ",
        "(0F0;0B1)OVERLAP_F_B\n",
        "(0F0; 0B1)OVERLAP_F_B",
        "(0F0,0B1)OVERLAP_F_B",
        "(0F0;0B1;0B2)OVERLAP_F_B",
        "((0F0;0B1)OVERLAP_F_B;0B1)OVERLAP_F_B",
        "0F0;0B1OVERLAP_F_B",
        "(;)OVERLAP_F_B",
        "(0F0;)OVERLAP_F_B",
        "(0B1;0F0)OVERLAP_F_B",
        "(0F0;0F1)OVERLAP_F_B",
        "(0F0;0I1)OVERLAP_F_B",
        "(0B0;0B1)OVERLAP_F_B",
        "(0SEND_F0;0B1)OVERLAP_F_B",
    ],
)
def test_anything_else_is_refused_and_shown(text):
    with pytest.raises(ScheduleError) as refused:
        parse_step(text)
    assert repr(text)[:40] in str(refused.value)
    assert len(str(refused.value)) < 500


@given(st.text(max_size=12) | st.text("0123456789FBIWSENDRCV_();OVERLAP -+\n", max_size=24))
@settings(derandomize=True, deadline=None, max_examples=500)
def test_what_the_parser_takes_it_writes_back_letter_by_letter(text):
    try:
        step = parse_step(text)
    except ScheduleError:
        return
    assert str(step) == text


def test_a_pair_in_the_wrong_order_is_told_how_to_write_it():
    with pytest.raises(ScheduleError, match=r"one F and one B, in this order.*joins B and F"):
        parse_step("(0B1;0F0)OVERLAP_F_B")


def test_kinds_know_what_they_are():
    assert [kind for kind in Kind if kind.is_compute] == [Kind.F, Kind.B, Kind.I, Kind.W]
    assert [kind for kind in Kind if kind.is_send] == [Kind.SEND_F, Kind.SEND_B]
    assert [kind for kind in Kind if kind.is_receive] == [Kind.RECV_F, Kind.RECV_B]


def test_flatten_gives_the_halves_of_a_pair_and_an_action_as_it_is():
    forward, backward = Action(Kind.F, 0, 7), Action(Kind.B, 7, 3)
    assert flatten(forward) == (forward,)
    assert flatten(FusedPair(forward, backward)) == (forward, backward)


def test_actions_cannot_be_changed():
    with pytest.raises(AttributeError):
        Action(Kind.F, 0, 0).stage = 1
