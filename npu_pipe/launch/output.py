"""What the ranks of a local launch print, with the rank before each line.

[0] step 1: loss 5.6
[1] warning: ...

Each rank writes into a file, and this process reads what has come: so no rank ever waits for a
terminal, and a line is never torn in two by another rank's, but for one of more than a megabyte.
Nor does this process wait for who reads it, such as a pager: it has ranks to watch meanwhile.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Sequence

__all__ = ["PrefixedOutput"]

_CHUNK = 1 << 16
_MOST = 1 << 20  # bytes of a rank at once, so that all get their turn
_LONGEST = 1 << 20  # bytes of a line
_TURN_S = 0.001  # in which who reads takes more, if it reads at all
_POLL_S = 0.03
_PATIENCE_S = 1.0


class PrefixedOutput:
    """Copies files to stdout; files: the descriptor of each rank's, and where to begin."""

    def __init__(self, files: Sequence[tuple[int, int]]) -> None:
        self._files = [fd for fd, _ in files]
        self._read = [start for _, start in files]
        self._rests: list[list[bytes]] = [[] for _ in files]
        self._pending = b""  # printed as soon as it is taken
        self._is_gone = sys.stdout is None
        width = len(str(len(files) - 1))
        self._prefixes = [f"[{rank:>{width}}] ".encode() for rank in range(len(files))]

    def copy(self) -> None:
        """Print the lines that have come to an end, as far as stdout takes them without delay."""
        for rank, fd in enumerate(self._files):
            limit = self._read[rank] + _MOST
            while self._read[rank] < limit:
                if not self._write():
                    return
                chunk = os.pread(fd, _CHUNK, self._read[rank])
                if not chunk:
                    break
                self._read[rank] += len(chunk)
                self._add(rank, chunk)

    def finish(self, is_to_end: Callable[[], bool]) -> None:
        """Print all that there is, the last line of each rank too.

        Waits for who reads it; once `is_to_end`, no longer than a second for a sign of life.
        """
        moved_s = time.monotonic()
        while self._pending or not self._are_all_read() or any(self._rests):
            before = sum(self._read), len(self._pending)
            self.copy()
            if self._are_all_read():
                for rank in range(len(self._files)):
                    self._end_line(rank)
            if before != (sum(self._read), len(self._pending)):
                moved_s = time.monotonic()
            elif is_to_end() and time.monotonic() >= moved_s + _PATIENCE_S:
                return
            else:
                time.sleep(_POLL_S)

    def _are_all_read(self) -> bool:
        ends = (os.fstat(fd).st_size for fd in self._files)
        return all(read >= end for read, end in zip(self._read, ends, strict=True))

    def _add(self, rank: int, chunk: bytes) -> None:
        whole, ends, rest = chunk.rpartition(b"\n")
        if ends:
            self._rests[rank].append(whole)
            self._end_line(rank)
        if rest:
            self._rests[rank].append(rest)
        if sum(map(len, self._rests[rank])) > _LONGEST:
            self._end_line(rank)

    def _end_line(self, rank: int) -> None:
        if not self._rests[rank]:
            return
        lines = b"".join(self._rests[rank]).split(b"\n")
        self._rests[rank] = []
        self._pending += b"".join(self._prefixes[rank] + line + b"\n" for line in lines)

    def _write(self) -> bool:
        """Whether stdout has taken all that is pending."""
        pending = memoryview(self._pending)
        try:
            while pending and not self._is_gone:
                fd = sys.stdout.fileno()
                if not select.select([], [fd], [], _TURN_S)[1]:
                    break
                # As much as a pipe with room surely takes without a wait.
                pending = pending[os.write(fd, pending[: select.PIPE_BUF]) :]
        except OSError:  # nobody reads any more
            self._is_gone = True
        self._pending = b"" if self._is_gone else bytes(pending)
        return not self._pending
