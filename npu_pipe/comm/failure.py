"""The seam where a transport's failures become ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from npu_pipe.errors import NpuPipeError, PeerError

__all__ = ["peer_failures"]

_TIMED_OUT = ("timed out", "timeout", "wait timeout")


@contextmanager
def peer_failures(what: str) -> Iterator[None]:
    """Turn a RuntimeError of torch.distributed into a PeerError that says what was being done."""
    try:
        yield
    except NpuPipeError:
        raise
    except RuntimeError as error:  # gloo raises nothing more precise
        text = str(error).split(". This is typically")[0].strip().splitlines()[0]
        if any(sign in text.lower() for sign in _TIMED_OUT):
            raise PeerError(
                "every rank comes to each transfer within the time-out",
                f"{what}: {text}",
                "look for a rank that is stuck or very slow; raise timeout_s if it only is slow",
            ) from error
        raise PeerError(
            "every rank stays alive and connected until the job ends",
            f"{what}: {text}",
            "look for the rank that failed first: its own error tells why",
        ) from error
