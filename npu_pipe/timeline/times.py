"""How the times of a timeline are written for people."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from npu_pipe.timeline.timeline import Timeline

__all__ = ["TimeScale", "nice_step", "scale_of", "time_scale"]


@dataclass(frozen=True, slots=True)
class TimeScale:
    """The unit in which times are shown.

    symbol: "us", "ms" or "s"; empty for the unit that the costs were given in.
    size: one such unit, in the timeline's own.
    """

    symbol: str
    size: float

    @property
    def axis(self) -> str:
        return f"time ({self.symbol or 'units of the costs'})"

    def number(self, time: float) -> str:
        """Up to four digits, without trailing zeros: 13250 us in ms is 13.25."""
        value = time / self.size
        decimals = 3 - (math.floor(math.log10(abs(value))) if value else 0)
        text = f"{value:.{min(max(decimals, 0), 6)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text

    def text(self, time: float) -> str:
        """The number with its unit."""
        return f"{self.number(time)} {self.symbol}".rstrip()


def time_scale(timeline: Timeline) -> TimeScale:
    """The unit that suits a timeline."""
    lengths = [span.end_us - span.start_us for span in timeline.compute]
    return scale_of(median(lengths or [0.0]), timeline.makespan)


def scale_of(action: float, makespan: float) -> TimeScale:
    """The unit that suits a makespan made of actions of this median length.

    A timeline does not say whether its times are microseconds or units of the costs. Costs by
    hand are a few units an action; a measured action, or a cost in microseconds, is rarely
    below twenty. That decides.
    """
    if action < 20:
        return TimeScale("", 1.0)
    for symbol, size in (("us", 1.0), ("ms", 1e3)):
        if makespan < 1e3 * size:
            return TimeScale(symbol, size)
    return TimeScale("s", 1e6)


def nice_step(length: float, most: int, *, of: tuple[float, ...] = (1, 2, 5)) -> float:
    """The smallest of 1, 2, 5 x 10^k that divides a length into at most `most` parts."""
    least = length / most if length > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(number * power for number in (*of, 10.0, 20.0) if number * power >= least)
