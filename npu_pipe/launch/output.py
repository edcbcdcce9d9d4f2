"""What the ranks of a local launch print, with the rank before each line.

[0] step 1: loss 5.6
[1] warning: ...

Each rank writes into a file, and this process reads what has come: so no rank ever waits for a
terminal, and a line is never torn in two by another rank's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["PrefixedOutput"]

_CHUNK = 1 << 16
_MOST = 1 << 20  # bytes of a rank at once, so that all get their turn


class PrefixedOutput:
    """Copies files to stdout; files: the descriptor of each rank's, and where to begin."""

    def __init__(self, files: Sequence[tuple[int, int]]) -> None:
        self._files = [fd for fd, _ in files]
        self._read = [start for _, start in files]
        self._rest = [b"" for _ in files]
        width = len(str(len(files) - 1))
        self._prefixes = [f"[{rank:>{width}}] ".encode() for rank in range(len(files))]

    def copy(self) -> None:
        """Print the lines that have come to an end."""
        for rank, fd in enumerate(self._files):
            limit = self._read[rank] + _MOST
            while self._read[rank] < limit:
                chunk = os.pread(fd, _CHUNK, self._read[rank])
                if not chunk:
                    break
                self._read[rank] += len(chunk)
                *lines, self._rest[rank] = (self._rest[rank] + chunk).split(b"\n")
                self._print(rank, lines)

    def finish(self) -> None:
        """Print all that there is, the last line of each rank too."""
        before = None
        while before != self._read:
            before = list(self._read)
            self.copy()
        for rank, rest in enumerate(self._rest):
            if rest:
                self._print(rank, [rest])
        self._rest = [b"" for _ in self._rest]

    def _print(self, rank: int, lines: Sequence[bytes]) -> None:
        text = b"".join(self._prefixes[rank] + line + b"\n" for line in lines)
        if text:
            with suppress(OSError):  # nobody reads any more
                sys.stdout.buffer.write(text)
                sys.stdout.buffer.flush()
