"""A command for tests: its processes carry a mark, so that none is lost sight of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "NPU_PIPE_TEST_COMMAND"

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
NPU_PIPE = [sys.executable, "-m", "npu_pipe"]


class Started:
    def __init__(self, command: list[str], folder: Path, environ: Mapping[str, str]) -> None:
        self._token = uuid.uuid4().hex
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ, MARK: self._token},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self) -> dict[int, dict[str, str]]:
        """The processes that live, whoever started them, and their environment."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit():
                    text = (entry / "environ").read_bytes().decode(errors="replace")
                    pairs = dict(p.split("=", 1) for p in text.split("\0") if "=" in p)
                    if pairs.get(MARK) == self._token:
                        found[int(entry.name)] = pairs
        return found

    def rank(self, rank: int) -> int:
        """The process of a rank: of those with its number, the one that is no child of another."""
        (pid,) = (
            pid
            for pid, environ in self.pids().items()
            if environ.get("RANK") == str(rank) and os.getpgid(pid) == pid
        )
        return pid

    def ranks(self) -> set[int]:
        """The numbers of those that live."""
        return {int(e["RANK"]) for e in self.pids().values() if e.get("RANK")}

    def end(self, within_s: float = 240) -> tuple[int, str, str]:
        """Status, stdout and stderr; and no process is left soon after."""
        out, err = self.process.communicate(timeout=within_s)
        wait_until(lambda: not self.pids(), within_s=10)
        return self.process.returncode, out, err

    def close(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=10)


@contextmanager
def started(
    command: list[str], folder: Path, environ: Mapping[str, str] | None = None
) -> Iterator[Started]:
    each = Started(command, folder, environ or {})
    try:
        yield each
    finally:
        each.close()


def wait_until(true: Callable[[], object], *, within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until_s, f"not so within {within_s} s"
        time.sleep(0.005)
