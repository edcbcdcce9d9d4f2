"""Wait until a meeting place can be used, in our own words.

A torch store that finds nobody, or somebody else, fills the screen with its stack before it gives
up.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

__all__ = ["QUIET_S", "find_address", "find_listener", "why_in_vain"]

QUIET_S = 10.0
"""In which ranks of several hosts start one after another, and nobody need know."""

_PAUSE_S = 0.2
_ATTEMPT_S = 5.0
_GREETING_S = 0.05


def find_address(address: str, port: int, _within_s: float) -> None:
    """Raises OSError unless the name is known: to rank 0 too, which listens there itself."""
    socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)


def find_listener(address: str, port: int, within_s: float) -> None:
    """Raises OSError unless somebody listens who may be a store: one that waits to be asked."""
    with socket.create_connection((address, port), timeout=within_s) as connection:
        connection.settimeout(_GREETING_S)
        with suppress(TimeoutError):
            is_closed = connection.recv(1) == b""
            raise OSError(f"who listens there {'hangs up' if is_closed else 'is no store'}")


def why_in_vain(
    attempt: Callable[[str, int, float], None],
    address: str,
    port: int,
    *,
    within_s: float,
    tell: Callable[[str], None],
) -> str | None:
    """None as soon as `attempt` succeeds; after `within_s`, what was wrong with the last one.

    A name that is not known may yet come to be: clusters make them while they start. tell: is
    called once, if it takes long, with what is wrong by then.
    """
    until_s = time.monotonic() + within_s
    quiet_until_s = time.monotonic() + QUIET_S
    while True:
        try:
            attempt(address, port, min(_ATTEMPT_S, max(0.1, until_s - time.monotonic())))
        except (OSError, UnicodeError) as error:
            why = f"{getattr(error, 'strerror', None) or error}".lower()
            if time.monotonic() >= until_s:
                return why
            if time.monotonic() >= quiet_until_s:
                tell(why)
                quiet_until_s = until_s
        else:
            return None
        time.sleep(_PAUSE_S)
