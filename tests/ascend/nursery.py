"""Ranks that start at once: copies of a process that has imported torch and torch_npu.

To import them takes longer than most tests. Nothing of the emulator is in use, and no thread runs,
when a copy is made.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TextIO

__all__ = ["Rank", "start_rank"]

SCRIPT = Path(__file__).parent / "ascend_rank.py"


class Rank:
    """One of them, as far as a Cluster needs it: see subprocess.Popen."""

    def __init__(self, pid: int, stdin: TextIO, stdout: TextIO) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self._process = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self) -> int | None:
        return self._ended(None)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> None:
        """It has ended: close what leads to it."""
        self.wait()
        self.stdin.close()
        self.stdout.close()
        os.close(self._process)

    def _ended(self, seconds: float | None) -> int | None:
        return 0 if select.select([self._process], [], [], seconds)[0] else None


def start_rank(libraries: Path, variables: Mapping[str, str]) -> Rank:
    """variables: of its environment, beside those of this process and of the nursery."""
    ours, theirs = os.pipe(), os.pipe()
    line = _nursery(libraries, variables["PYTHONPATH"])
    socket.send_fds(line, [json.dumps(dict(variables)).encode()], [ours[0], theirs[1]])
    os.close(ours[0])
    os.close(theirs[1])
    pid = int(line.recv(32))
    return Rank(pid, os.fdopen(ours[1], "w"), os.fdopen(theirs[0]))


@cache
def _nursery(libraries: Path, path: str) -> socket.socket:
    """Started when the first rank is, and ended with this process at the latest."""
    line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {
        "LD_LIBRARY_PATH": str(libraries),  # what a process is started with counts
        "PYTHONPATH": path,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(SCRIPT), str(other.fileno())],
        env={**os.environ, **variables},
        pass_fds=[other.fileno()],
    )
    other.close()

    def end() -> None:
        line.close()
        process.wait()

    atexit.register(end)
    return line
