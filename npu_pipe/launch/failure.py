"""Failure: what ended a rank, as it crosses from the rank to the process that started it."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from npu_pipe.errors import ConfigError, NpuPipeError, PeerError, UsageError

__all__ = ["Failure", "failure_of", "first_failure", "from_json", "to_json"]

# What gloo and the store say when the other end has gone away. They have no types for it.
_PEER_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Connection was likely closed",
    "failed to recv, got 0 bytes",
)
_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"


@dataclass(frozen=True, slots=True)
class Failure:
    """time_s: CLOCK_MONOTONIC, one clock for all processes of a machine. status: exit status.
    text: for the user. consequence: another rank has probably failed before this one."""

    rank: int
    time_s: float
    status: int
    text: str
    consequence: bool


def failure_of(error: BaseException, *, rank: int) -> Failure:
    """An error of this package is its message; any other one is a bug, so its traceback.

    But for want of memory, of which torch makes a RuntimeError: that is a matter of the sizes.
    """
    if isinstance(error, MemoryError) or _NO_MEMORY in str(error):
        error = ConfigError(
            "what a rank holds fits into its memory",
            " ".join(str(error).splitlines()[:1])[:200] or "it does not",
            "use smaller sizes, more microbatches or more ranks",
        )
    known = isinstance(error, NpuPipeError)
    text = str(error) if known else "".join(traceback.format_exception(error)).rstrip()
    return Failure(
        rank=rank,
        time_s=time.monotonic(),
        status=2 if isinstance(error, UsageError) else 1,
        text=text,
        consequence=any(_peer_is_gone(link) for link in _chain(error)),
    )


def first_failure(failures: Iterable[Failure]) -> Failure:
    """The failure to show: the earliest that is not the consequence of another, if any is not."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time_s))


def to_json(failure: Failure) -> bytes:
    return json.dumps(asdict(failure)).encode()


def from_json(document: bytes) -> Failure | None:
    """None if the document is not all there, as when the rank was killed while it wrote."""
    try:
        fields: dict[str, Any] = json.loads(document)
    except ValueError:
        return None
    return Failure(**fields)


def _peer_is_gone(error: BaseException) -> bool:
    return isinstance(error, (PeerError, ConnectionError)) or (
        isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PEER_IS_GONE)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
