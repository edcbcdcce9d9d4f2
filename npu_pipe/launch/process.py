"""RankProcess: one rank of a local launch, as its parent sees it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from npu_pipe.errors import ConfigError, RunError
from npu_pipe.launch.failure import Failure, from_json
from npu_pipe.launch.spawned import rank_environment
from npu_pipe.launch.world import World

__all__ = ["RankProcess"]

_TAIL_BYTES = 4000


class RankProcess:
    """A process in a session of its own, from its start to `kill`.

    It is not waited for before `kill`: until then its number, which is also that of its process
    group, cannot come to name anything else.
    """

    def __init__(
        self,
        command: Sequence[str],
        world: World,
        *,
        environ: Mapping[str, str],
        log: Path | None,
        on_terminal: bool,
        is_shown: bool,
    ) -> None:
        """Start it. It writes to this process's terminal, or else to `log` or a held-back file.

        is_shown: whether what it writes there is printed meanwhile.
        Raises ConfigError if the command or the log cannot be opened.
        """
        self.rank = world.rank
        self._log = log
        self._is_shown = is_shown
        self._failure: Failure | None = None
        with ExitStack() as files:
            # Nameless files: they outlive the rank and nothing else, however the job ends.
            self._report = files.enter_context(tempfile.TemporaryFile())
            self._output: IO[bytes] | None = None
            world = dataclasses.replace(world, report_fd=self._report.fileno())
            descriptors = (world.listen_fd, world.report_fd, world.lifeline_fd)
            try:
                if not on_terminal:
                    self._output = files.enter_context(_output_file(log))
                    self._output_start = os.fstat(self._output.fileno()).st_size
                self._process = subprocess.Popen(
                    command,
                    env=rank_environment(world, environ),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    start_new_session=True,
                    pass_fds=[fd for fd in descriptors if fd is not None],
                )
            except OSError as error:
                raise ConfigError(
                    "the command of a rank can be run, and its log be written",
                    f"{error.filename or command[0]}: {error.strerror}",
                    "give another command or log folder",
                ) from error
            self._files = files.pop_all()

    def status(self) -> int | None:
        """None while it runs; then its exit status, or minus the signal that killed it."""
        end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def failure(self) -> Failure | None:
        """What it has reported, even if it still runs, or how it ended without a report."""
        if self._failure is None:
            # In this order: a report may be written between the two, none after the end.
            status = self.status()
            size = os.fstat(self._report.fileno()).st_size
            self._failure = from_json(os.pread(self._report.fileno(), size, 0))
            if self._failure is None and status:
                self._failure = self._silent_failure(status)
        return self._failure

    def is_stopped(self) -> bool:
        """Whether it has been stopped (SIGSTOP, a debugger) and not gone on since."""
        flags = os.WSTOPPED | os.WCONTINUED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):  # it has ended
            change = os.waitid(os.P_PID, self._process.pid, flags)
            return change is not None and change.si_code == os.CLD_STOPPED
        return False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> tuple[int, int]:
        """The file that it writes to, and where in it its own begins."""
        assert self._output is not None
        return self._output.fileno(), self._output_start

    def send(self, number: signal.Signals) -> None:
        """Signal the rank and all it has started in its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill what is left of its process group and wait for it."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Let go of its files; after `kill`."""
        self._files.close()

    def _silent_failure(self, status: int) -> Failure:
        facts = f"exited with status {status} and reported no error"
        if status < 0:
            facts = f"was killed by {signal.Signals(-status).name}"
        text = str(RunError("every rank runs to its end", facts, self._cure(status)))
        return Failure(
            rank=self.rank,
            time_s=time.monotonic(),
            status=status if status > 0 else 128 - status,
            text="\n".join(filter(None, (text, self._tail()))),
            consequence=False,
        )

    def _cure(self, status: int) -> str:
        if status == -signal.SIGKILL:
            return "look in the kernel's log (dmesg) for 'out of memory', or for who killed it"
        if status == -signal.SIGBUS:
            return "look for a data file that was cut short while it was read, or a full disk"
        if self._output is not None and os.fstatvfs(self._output.fileno()).f_bavail == 0:
            place = self._log or tempfile.gettempdir()
            return f"make room for its output: the disk of {place} is full"
        if self._output is not None and self._log is not None:
            return f"read its output in {self._log}"
        if self._output is not None and not self._is_shown:
            return "its last output follows"
        return "read its output above"

    def _tail(self) -> str:
        if self._output is None or self._is_shown:
            return ""
        fd = self._output.fileno()
        start = max(self._output_start, os.fstat(fd).st_size - _TAIL_BYTES)
        return os.pread(fd, _TAIL_BYTES, start).decode(errors="replace").rstrip()


def _output_file(log: Path | None) -> IO[bytes]:
    if log is None:
        return tempfile.TemporaryFile()
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab+")
