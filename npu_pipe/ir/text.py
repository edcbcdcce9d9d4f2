"""The text form of whole orders: one line a rank, columns aligned.

rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1B1
"""

from __future__ import annotations

from itertools import zip_longest

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Step, parse_step

__all__ = ["format_orders", "parse_orders"]


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
    for line in text.strip().splitlines():
        head, colon, steps = line.partition(":")
        if not colon or head.strip() != f"rank {len(orders)}":
            raise ScheduleError(
                "orders are written one line a rank, 'rank 0: 0F0 0B0', counting from 0",
                f"line {len(orders)} is {line!r}",
                f"start it with 'rank {len(orders)}:'",
                rank=len(orders),
            )
        orders.append(tuple(parse_step(word) for word in steps.split()))
    return tuple(orders)
