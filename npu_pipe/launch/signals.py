"""The signals that ask a job to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["caught_signals"]


@contextmanager
def caught_signals() -> Iterator[list[signal.Signals]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list instead of acting on them; main thread only.

    A list, because an exception out of a handler could strike between the start of a process and
    the note of it. A signal that is ignored stays so: nohup and a shell's `&` rely on that.
    """
    caught: list[signal.Signals] = []

    def catch(number: int, _frame: FrameType | None) -> None:
        caught.append(signal.Signals(number))

    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, catch)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
