"""What Linux tells of a process, in /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["PROC", "ProcessLine", "children", "process_line"]

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """is_dead: ended, waited for or not. began: its number alone may come to name another one."""

    is_dead: bool
    parent: int
    group: int
    began: str


def process_line(pid: int) -> ProcessLine | None:
    """Of /proc/PID/stat; None if there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return ProcessLine(fields[0] in "ZX", int(fields[1]), int(fields[2]), fields[19])


def children(pid: int) -> set[int]:
    """The processes whose parent it is, dead ones included."""
    numbers = (int(folder.name) for folder in PROC.iterdir() if folder.name.isdigit())
    lines = ((number, process_line(number)) for number in numbers)
    return {number for number, line in lines if line is not None and line.parent == pid}
