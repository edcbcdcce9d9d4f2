"""Wait until somebody listens at an address, in our own words.

A torch store that finds nobody fills the screen with its stack before it gives up.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

__all__ = ["QUIET_S", "why_unreachable"]

QUIET_S = 10.0
"""In which ranks of several hosts start one after another, and nobody need know."""

_PAUSE_S = 0.2
_ATTEMPT_S = 5.0


def why_unreachable(
    address: str, port: int, *, within_s: float, tell: Callable[[str], None]
) -> str | None:
    """None as soon as a connection succeeds; after `within_s`, what was wrong with the last one.

    A name that is not known may yet come to be: clusters make them while they start. tell: is
    called once, if it takes long, with what is wrong by then.
    """
    until_s = time.monotonic() + within_s
    quiet_until_s = time.monotonic() + QUIET_S
    while True:
        try:
            left_s = max(0.1, until_s - time.monotonic())
            socket.create_connection((address, port), timeout=min(_ATTEMPT_S, left_s)).close()
        except OSError as error:
            why = f"{error.strerror or error}".lower()
            if time.monotonic() >= until_s:
                return why
            if time.monotonic() >= quiet_until_s:
                tell(why)
                quiet_until_s = until_s
        else:
            return None
        time.sleep(_PAUSE_S)
