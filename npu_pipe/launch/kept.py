"""The lifeline of a local launch: what ends its processes if it is killed itself."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from npu_pipe.launch import keeper

__all__ = ["Lifeline", "lifeline"]

_MARK = "NPU_PIPE_LAUNCH"


@dataclass(frozen=True, slots=True)
class Lifeline:
    """fd: reads as closed once this process is gone. environ: what every process of the launch
    carries, and hands on to those that it starts."""

    fd: int
    environ: dict[str, str]


@contextmanager
def lifeline() -> Iterator[Lifeline]:
    """While the block runs, a keeper stands by. When this process is killed, or leaves the block,
    all that carries the mark of this launch is killed."""
    mark = secrets.token_hex(8)
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(keeper.__file__)), str(reading), _pair(mark)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[reading],
            start_new_session=True,
        )
        try:
            yield Lifeline(reading, {_MARK: mark})
        finally:
            os.close(writing)
            process.wait()
    finally:
        os.close(reading)


def _pair(mark: str) -> str:
    return f"{_MARK}={mark}"
