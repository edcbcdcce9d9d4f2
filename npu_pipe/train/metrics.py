"""Metrics as JSON lines.

{"kind": "update", "step": 10, "loss": 4.41, "lr": 0.0015, "grad_norm": 2.5, ...}
{"kind": "bubble", "step": 10, "measured": 0.31}
{"kind": "validation", "step": 50, "loss": 2.21}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from npu_pipe.errors import ConfigError
from npu_pipe.files import write_whole

__all__ = ["MetricsLog", "read_metrics"]


class MetricsLog:
    """A file that lines are added to; every line is there as soon as it is written."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Open it, and drop the lines of later steps: those will be run again.

        Raises ConfigError, as `write` does, where the file cannot be written.
        """
        self._path = path
        with self._refusals():
            if path.is_file():
                kept = [line for line in read_metrics(path) if line["step"] <= after_step]
                write_whole("".join(json.dumps(line) + "\n" for line in kept), path)
            self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **values: float) -> None:
        """Add a line."""
        with self._refusals():
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError) if error else self._refusals():
            self._file.close()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                "metrics are written into the run folder",
                f"{self._path}: {error.strerror}",
                "make room or mend the rights, then go on with --resume",
            ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; what is none, as one cut off when its run was killed, is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines
