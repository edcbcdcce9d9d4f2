"""Metrics as JSON lines.

{"kind": "update", "step": 10, "loss": 4.41, "lr": 0.0015, "grad_norm": 2.5, ...}
{"kind": "bubble", "step": 10, "measured": 0.31}
{"kind": "validation", "step": 50, "loss": 2.21}
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from npu_pipe.files import write_whole

__all__ = ["MetricsLog", "read_metrics"]


class MetricsLog:
    """A file that lines are added to; every line is there as soon as it is written."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Open it, and drop the lines of later steps: those will be run again."""
        if path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= after_step]
            write_whole("".join(json.dumps(line) + "\n" for line in kept), path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **values: float) -> None:
        """Add a line."""
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
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; one that was cut off when its run was killed is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(text))
    return lines
