"""Failure: which error of a broken job is the one to show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npu_pipe.errors import ConfigError, PeerError, RunError
from npu_pipe.launch.failure import Failure, failure_of, first_failure, from_json, to_json

CAUSE = Failure(rank=1, time_s=5.0, status=1, text="cause", consequence=False)


def test_the_earliest_failure_is_shown() -> None:
    later = replace(CAUSE, rank=0, time_s=5.1)
    assert first_failure([later, CAUSE]) == CAUSE


def test_a_cause_is_shown_before_the_consequence_that_was_seen_earlier() -> None:
    closed = replace(CAUSE, rank=0, time_s=4.9, consequence=True)
    assert first_failure([closed, CAUSE]) == CAUSE


def test_among_consequences_alone_the_earliest_is_shown() -> None:
    first = replace(CAUSE, rank=3, consequence=True)
    assert first_failure([replace(first, rank=0, time_s=6.0), first]) == first


@pytest.mark.parametrize(
    ("error", "status", "consequence"),
    [
        (ConfigError("rule", "facts", "cure"), 2, False),
        (RunError("rule", "facts", "cure"), 1, False),
        (PeerError("rule", "facts", "cure"), 1, True),
    ],
)
def test_an_error_of_the_package_is_its_message(
    error: Exception, status: int, consequence: bool
) -> None:
    failure = failure_of(error, rank=2)
    assert failure == Failure(
        rank=2,
        time_s=failure.time_s,
        status=status,
        text="rule; facts; cure",
        consequence=consequence,
    )


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (raised(ValueError("Broken pipe")), False),
        (raised(RuntimeError("shapes differ")), False),
        (raised(RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1")), True),
        (raised(BrokenPipeError("gone")), True),
        (raised(KeyError("x"), cause=PeerError("a", "b", "c")), True),
    ],
)
def test_any_other_error_is_its_traceback_and_a_lost_peer_is_known(
    error: Exception, consequence: bool
) -> None:
    failure = failure_of(error, rank=0)
    assert failure.text.startswith(("Traceback", "npu_pipe.errors.PeerError"))
    assert type(error).__name__ in failure.text
    assert (failure.status, failure.consequence) == (1, consequence)


def test_a_failure_crosses_as_json_and_half_of_it_is_none() -> None:
    assert from_json(to_json(CAUSE)) == CAUSE
    assert from_json(to_json(CAUSE)[:-3]) is None
    assert from_json(b"") is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 298. GiB for an array"),
        MemoryError(),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: 64 bytes\nmore"),
    ],
)
def test_want_of_memory_is_a_matter_of_sizes(error: Exception) -> None:
    failure = failure_of(error, rank=1)
    assert failure.status == 2
    assert failure.text.startswith("what a rank holds fits into its memory")
    assert failure.text.count("\n") == 0
