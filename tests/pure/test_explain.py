"""What the libraries of devices answer with, said in a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npu_pipe.comm.explain import SYMPTOMS, explained
from npu_pipe.comm.failure import peer_failures
from npu_pipe.errors import ConfigError, PeerError

PAGE = Path(__file__).parents[2] / "docs" / "symptoms.md"
WHERE = "in 1B2 of step 2 (stage 1, backward of microbatch 2)"

SEEN = {
    "EI0006": "[ERROR] EI0006: Getting socket times out. Reason: 1. The remote does not initiate",
    "EI0002": "EI0002: The wait execution of the Notify register times out.",
    "ERR02200": "The Inner error is reported as above. The process exits for this inner error, and "
    "the current working operator name is HcclSend.\n[ERROR] 2026-11-29-18:30:36 (PID:3566, "
    "Device:1, RankID:1) ERR00100 PTA call acl api failed.\nsocket closed",
    "ERR00100": "npuSynchronizeDevice: NPU function error: AclrtSynchronizeDeviceWithTimeout, "
    "error code is 507000\n[ERROR] ERR00100 PTA call acl api failed\nnothing answers",
    "ncclRemoteError": "NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited or there "
    "was a network error, NCCL version 2.27.3\nncclRemoteError: A call failed possibly due to a "
    "network error or a remote process exiting prematurely.",
}


@pytest.mark.parametrize("code", SEEN)
def test_an_error_of_the_library_is_told_with_code_place_meaning_and_its_own_words(
    code: str,
) -> None:
    cause = explained(RuntimeError(SEEN[code]), WHERE)
    assert cause is not None
    (symptom,) = [each for each in SYMPTOMS if each.code == code]
    last = SEEN[code].splitlines()[-1]
    assert cause.facts == f"{code} {WHERE}: {symptom.meaning} ({last})"
    assert cause.cure == symptom.cure


def test_a_lost_connection_speaks_for_itself_and_other_errors_are_of_the_rank() -> None:
    lost = explained(PeerError("the rule", "the facts", "the cure"), WHERE)
    assert lost is not None
    assert (lost.rule, lost.facts, lost.cure) == ("the rule", "the facts", "the cure")
    for error in (
        ValueError("EI0006"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ConfigError("a rule", "EI0006", "a cure"),
        KeyboardInterrupt(),
    ):
        assert explained(error, WHERE) is None


def test_the_page_for_users_has_each_row_in_the_same_words() -> None:
    rows = re.findall(r"^\| (\w+) \| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    page = {row for row in rows if row[0] not in ("code", "symptom")}
    assert page == {(each.code, each.meaning, each.cure) for each in SYMPTOMS}


def test_an_error_in_the_middle_of_a_transfer_is_told_with_its_code_too() -> None:
    """Work that was given to a queue fails in a later call: where it came out, it was a lost
    connection without a word of the code."""
    with (
        pytest.raises(PeerError, match="ERR02200 while 1RECV_B2 was waiting for rank 0: a call"),
        peer_failures("{} was waiting for rank {}", "1RECV_B2", 0),
    ):
        raise RuntimeError(SEEN["ERR02200"])


def test_the_chinese_page_has_the_same_codes_in_the_same_order() -> None:
    page = PAGE.with_name("symptoms.zh-CN.md").read_text(encoding="utf-8")
    codes = re.findall(r"^\| (\w+) \| .+ \| .+ \|$", page, re.M)
    assert [code for code in codes if code.isascii()] == [each.code for each in SYMPTOMS]
