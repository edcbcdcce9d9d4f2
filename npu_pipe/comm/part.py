"""Part: one of several messages that a transfer goes in."""

from __future__ import annotations

from typing import Self

from npu_pipe.ir.action import Action

__all__ = ["Part", "part_of", "tile_ends"]


class Part(Action):
    """A transfer's `number`-th message. It has the transfer's name and way, and a form of its own;
    it equals no other part, nor the transfer."""

    number: int

    def __new__(cls, whole: Action, number: int) -> Self:
        self = super().__new__(cls, *whole)
        self.number = number
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and self.number == other.number and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple.__hash__(self), self.number))


def part_of(transfer: Action) -> int:
    """Which part of its transfer this is; -1 for all of it."""
    return transfer.number if isinstance(transfer, Part) else -1


def tile_ends(rows: int, tiles: int) -> tuple[int, ...]:
    """Where the tiles end that rows are cut into; some are empty where there are fewer rows."""
    return tuple(rows * (index + 1) // tiles for index in range(tiles))
