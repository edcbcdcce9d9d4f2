"""Phases: what a rank does in a step beside its actions and transfers."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Phase", "PhaseSpan"]


class Phase(enum.StrEnum):
    """What it is; the value is its word in files and tables.

    LOSS lies inside the F of the last stage. The others follow the window, and what a rank
    waits for the others in REDUCTION and CLIPPING is counted with them.
    """

    LOSS = "loss"
    REDUCTION = "reduction"
    CLIPPING = "clipping"
    OPTIMIZER = "optimizer"


class PhaseSpan(NamedTuple):
    """One phase on one rank. Times as in `Span`; those after the window too."""

    rank: int
    phase: Phase
    start_us: float
    end_us: float
