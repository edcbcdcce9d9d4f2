"""What a launch, or a rank of it, tells the user beside its output."""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = ["say"]


def say(text: str) -> None:
    """Print it to stderr, unless nobody is there any more: after SIGHUP the terminal is gone."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
