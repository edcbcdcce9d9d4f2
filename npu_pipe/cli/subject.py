"""What the word SCHEDULE of a verb names: a schedule of the registry, or a file."""

from __future__ import annotations

import json
from pathlib import Path

from npu_pipe.errors import ConfigError
from npu_pipe.ir.files import is_file_name, load_program, load_schedule
from npu_pipe.ir.program import Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.registry import FAMILIES, build_schedule

__all__ = ["read_subject"]


def read_subject(
    word: str, *, verb: str, ranks: int | None, microbatches: int | None, chunks: int | None
) -> Schedule | Program:
    """A program where the file has transfers; else a schedule.

    The sizes are for names; a file knows its own. Raises ScheduleError, and ConfigError for a
    name without its sizes, or a file or folder that is no schedule.
    """
    if is_file_name(word):
        return load_program(word) if _has_transfers(Path(word)) else load_schedule(word)
    if word not in FAMILIES and Path(word).exists():
        kind = "a folder" if Path(word).is_dir() else "a file of another kind"
        raise ConfigError(
            "SCHEDULE is the name of a schedule, or a file that ends in .json or .csv",
            f"{word} is {kind}",
            f"give such a file, or a name: npu-pipe {verb} 1f1b -p 4 -m 8",
        )
    if ranks is None or microbatches is None:
        raise ConfigError(
            "a schedule is built for a number of ranks and of microbatches",
            f"{word} came without {'-p' if ranks is None else '-m'}",
            f"for example: npu-pipe {verb} {word} -p 4 -m 8",
        )
    return build_schedule(word, ranks=ranks, microbatches=microbatches, chunks=chunks)


def _has_transfers(path: Path) -> bool:
    """Only which of the two it is meant to be; the loaders find what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            data = json.loads(text)
            return isinstance(data, dict) and data.get("format") == "npu_pipe.program"
        return "SEND_" in text or "RECV_" in text
    except (OSError, ValueError, RecursionError):
        return False
