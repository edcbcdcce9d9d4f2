"""Sizes that no schedule can have, and words for those that a rule does not cover."""

from __future__ import annotations

from npu_pipe.errors import ScheduleError

__all__ = ["check_sizes", "either"]

_MOST = 1 << 24  # forwards; with their backwards they take some gigabytes


def check_sizes(ranks: int, microbatches: int, *, chunks: int = 1) -> None:
    """Raise ScheduleError unless these are whole numbers from 1, and small enough to build."""
    sizes = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    for what, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ScheduleError(
                f"{what} is a whole number of at least 1", f"it is {value!r}", f"give {what} >= 1"
            )
    if ranks * chunks * microbatches > _MOST:
        raise ScheduleError(
            f"ranks x chunks x microbatches is at most {_MOST}",
            f"it is {ranks} x {chunks} x {microbatches}",
            "give fewer of them",
        )


def either(below: int, above: int) -> str:
    """The nearest sizes that work; there may be none below."""
    return f"{below} or {above}" if below >= 1 else f"{above}"
