"""The text form of whole orders: one line a rank, columns aligned.

rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1B1
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Step, parse_step

__all__ = ["format_orders", "parse_order", "parse_orders"]


def format_orders(orders: tuple[tuple[Step, ...], ...]) -> str:
    """The grid above; `parse_orders` reads it back."""
    rows = [[f"rank {rank}:", *map(str, order)] for rank, order in enumerate(orders)]
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return "\n".join(
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    )


def parse_orders(text: str) -> tuple[tuple[Step, ...], ...]:
    """Read the grid back. Raises ScheduleError for a line or step that is not of this form."""
    orders: list[tuple[Step, ...]] = []
    for line in filter(None, text.split("\n")):
        rank = len(orders)
        head = f"rank {rank}:"
        if not line.startswith(head):
            raise ScheduleError(
                "orders are written one line a rank, 'rank 0: 0F0 0B0', counting from 0",
                f"line {rank} is {line!r:.80}",
                f"start it with {head!r}",
                rank=rank,
            )
        orders.append(parse_order(filter(None, line.removeprefix(head).split(" ")), rank=rank))
    return tuple(orders)


def parse_order(texts: Iterable[str], *, rank: int) -> tuple[Step, ...]:
    """The steps of one rank. Raises ScheduleError with rank and position."""
    steps: list[Step] = []
    for text in texts:
        try:
            steps.append(parse_step(text))
        except ScheduleError as error:
            place = f"rank {rank} has it at position {len(steps)}"
            raise ScheduleError(
                error.rule,
                f"{error.facts}: {place}",
                error.cure,
                rank=rank,
                position=len(steps),
                action=text,
            ) from None
    return tuple(steps)
