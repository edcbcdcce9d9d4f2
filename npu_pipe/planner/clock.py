"""The time that a search has."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Clock"]


@dataclass(frozen=True, slots=True)
class Clock:
    """begin_s: on the monotonic clock."""

    begin_s: float
    limit_s: float

    @classmethod
    def start(cls, limit_s: float) -> Clock:
        return cls(time.perf_counter(), limit_s)

    def part(self, share: float) -> Clock:
        """A clock that ends after a share of what is left."""
        return Clock(time.perf_counter(), max(self.left_s, 0.0) * share)

    @property
    def spent_s(self) -> float:
        return time.perf_counter() - self.begin_s

    @property
    def left_s(self) -> float:
        return self.limit_s - self.spent_s

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0
