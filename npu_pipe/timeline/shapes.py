"""What pictures are made of: shapes on a sheet, in the order they are painted.

Lengths are pixels, y grows downwards. Painters (SVG, PNG) know these and nothing of timelines.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Anchor", "Box", "Label", "Line", "Shape", "Sheet"]


class Anchor(enum.StrEnum):
    """Which end of a label stands at its x; the values are SVG's."""

    START = "start"
    MIDDLE = "middle"
    END = "end"


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle. `hint` is shown while the pointer is over it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """From (x, y) to (to_x, to_y), with an arrow head there if `arrow`."""

    x: float
    y: float
    to_x: float
    to_y: float
    colour: str
    arrow: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """Text whose vertical middle is at y."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    anchor: Anchor = Anchor.START
    bold: bool = False

    @property
    def width(self) -> float:
        return text_width(self.text, self.size)


Shape: TypeAlias = Box | Line | Label


@dataclass(frozen=True, slots=True)
class Sheet:
    """A finished layout. `title` and `summary` are for who cannot see it."""

    width: float
    height: float
    title: str
    summary: str
    shapes: tuple[Shape, ...]


def text_width(text: str, size: float) -> float:
    """About how wide a text is, rather more than less, in the fonts that painters use."""
    return size * sum(map(_em, text))


def _em(letter: str) -> float:
    if letter in " .,:;ijlrtI":
        return 0.36
    return 0.64 if letter.isdigit() or letter.isupper() else 0.6
