"""A job under a real launcher: what it printed, how it ended, which processes are left of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["PATIENCE_S", "Launched", "free_port", "wait_until"]

PATIENCE_S = 240.0
"""In which a machine that is busy with other things starts and ends a few ranks."""


class Launched:
    """One launcher or several, as many as there are nodes, and all that they have started."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self._mark = {"NPU_PIPE_TEST_LAUNCHED": uuid.uuid4().hex}
        self.environ = {**os.environ, **environ, **self._mark}
        self._launchers: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], **environ: str) -> None:
        """In a process group of its own, as a shell does it; the output goes to a file, which
        what outlives the launcher cannot hold open for us."""
        with (self.folder / f"output{len(self._launchers)}").open("wb") as output:
            self._launchers.append(
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=self.environ | environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def ranks(self, ranks: int) -> list[int]:
        """Wait until that many ranks say that they have made a step; their process numbers."""
        files = [self.folder / f"ready{rank}" for rank in range(ranks)]

        def ready() -> bool:
            assert not self._all_ended(), self.output()
            return all(file.exists() and file.read_text() for file in files)

        wait_until(ready, within_s=PATIENCE_S, otherwise=self.output)
        return [int(file.read_text()) for file in files]

    def interrupt(self) -> None:
        """Ctrl-C: the whole foreground group gets it."""
        for launcher in self._launchers:
            os.killpg(launcher.pid, signal.SIGINT)

    def send(self, number: signal.Signals) -> None:
        """To the launchers alone."""
        for launcher in self._launchers:
            launcher.send_signal(number)

    def end(self, *, within_s: float) -> list[int]:
        """The statuses of the launchers; fails unless all has ended, launcher and ranks."""
        wait_until(
            lambda: self._all_ended() and not self.left(),
            within_s=within_s,
            otherwise=lambda: f"left: {self.left()}\n{self.output()}",
        )
        return [launcher.wait() for launcher in self._launchers]

    def left(self, **environ: str) -> list[int]:
        """Processes that carry this job's mark, whoever started them, and these variables; the
        dead do not count."""
        marks = {f"{name}={text}".encode() for name, text in {**environ, **self._mark}.items()}
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and marks <= set(
                    (entry / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(entry.name))
        return found

    def said(self) -> list[str]:
        """The sentence of each rank that has made its step and ended, sorted."""
        return sorted(file.read_text() for file in self.folder.glob("said *"))

    def output(self) -> str:
        """What launchers and ranks have printed, msrun's logs included."""
        return "".join(
            path.read_text(errors="replace") for path in _files(self.folder) if path.is_file()
        )

    def close(self) -> None:
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self._launchers:
            launcher.wait(timeout=10)

    def _all_ended(self) -> bool:
        return all(launcher.poll() is not None for launcher in self._launchers)


def _files(folder: Path) -> Iterable[Path]:
    return [*sorted(folder.glob("output*")), *sorted(folder.glob("log*/*.log"))]


def wait_until(
    true: Callable[[], bool], *, within_s: float, otherwise: Callable[[], str] = lambda: ""
) -> None:
    until_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until_s, f"not so within {within_s} s: {otherwise()}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
