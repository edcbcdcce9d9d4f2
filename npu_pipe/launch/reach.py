"""Wait until somebody listens at an address, in our own words.

A torch store that finds nobody fills the screen with its stack before it gives up.
"""

from __future__ import annotations

import socket
import time

__all__ = ["why_unreachable"]

_PAUSE_S = 0.2
_ATTEMPT_S = 5.0


def why_unreachable(address: str, port: int, *, within_s: float) -> str | None:
    """None as soon as a connection succeeds; after `within_s`, what was wrong with the last one.

    A name that is not known may yet come to be: clusters make them while they start.
    """
    until_s = time.monotonic() + within_s
    while True:
        try:
            left_s = max(0.1, until_s - time.monotonic())
            socket.create_connection((address, port), timeout=min(_ATTEMPT_S, left_s)).close()
        except OSError as error:
            if time.monotonic() >= until_s:
                return f"{error.strerror or error}".lower()
        else:
            return None
        time.sleep(_PAUSE_S)
