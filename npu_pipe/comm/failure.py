"""The seam where a transport's failures become ours."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from npu_pipe.comm.explain import explained
from npu_pipe.errors import NpuPipeError, PeerError

__all__ = ["peer_failures"]

_TIMED_OUT = ("timed out", "timeout", "wait timeout")


def peer_failures(what: str, *parts: object) -> AbstractContextManager[None]:
    """Turn a RuntimeError of torch.distributed into a PeerError that says what was being done.

    what: a format for `parts`, filled in only after a failure: this stands around every transfer.
    """
    return _PeerFailures(what, parts)


class _PeerFailures:
    __slots__ = ("_parts", "_what")

    def __init__(self, what: str, parts: tuple[object, ...]) -> None:
        self._what = what
        self._parts = parts

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # gloo raises nothing more precise than RuntimeError
        if isinstance(error, RuntimeError) and not isinstance(error, NpuPipeError):
            raise _lost(self._what.format(*self._parts), error) from error


def _lost(what: str, error: RuntimeError) -> PeerError:
    cause = explained(error, f"while {what}")
    if cause is not None:  # a device's library has a code for it
        return PeerError(cause.rule, cause.facts, cause.cure)
    text = str(error).split(". This is typically")[0].strip().splitlines()[0]
    if any(sign in text.lower() for sign in _TIMED_OUT):
        return PeerError(
            "every rank comes to each transfer within the time-out",
            f"{what}: {text}",
            "look for a rank that is stuck; raise connect_s if it only is slow to start",
        )
    return PeerError(
        "every rank stays alive and connected until the job ends",
        f"{what}: {text}",
        "look for the rank that failed first: its own error tells why",
    )
