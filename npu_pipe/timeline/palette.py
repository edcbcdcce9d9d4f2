"""One colour a kind, for pictures, the terminal and traces.

Told apart by lightness alone, so also in grey and by colour-blind eyes:

    F  blue    L* 37      the halves I and W are red and yellow, and B, which is
    I  red     L* 53      both, is the orange between them
    B  orange  L* 71
    W  yellow  L* 87

Later stages of a rank are lighter.
"""

from __future__ import annotations

from npu_pipe.ir.action import Action, FusedPair, Kind, Step, flatten
from npu_pipe.ir.program import Lane
from npu_pipe.ir.schedule import Schedule

__all__ = [
    "GREY",
    "IDLE",
    "INK",
    "KIND_NAMES",
    "LANE_COLOURS",
    "PATH",
    "Chunks",
    "fill",
    "ink",
]

INK = "#1d2733"
GREY = "#5f6b7a"
IDLE = "#e9ecf1"
PATH = "#c2127f"
LANE_COLOURS = {Lane.DOWN: "#38618f", Lane.UP: "#b0561f"}

KIND_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}

_FILL = {Kind.F: "#2a5796", Kind.I: "#cf5a48", Kind.B: "#ee9d3f", Kind.W: "#f3d976"}


class Chunks:
    """Which chunk of its rank a stage is."""

    def __init__(self, schedule: Schedule) -> None:
        self._held = [schedule.stages_of(rank) for rank in range(schedule.ranks)]
        self._index = [{stage: i for i, stage in enumerate(held)} for held in self._held]
        self.most = max(map(len, self._held), default=1)

    def stages(self, rank: int) -> tuple[int, ...]:
        return self._held[rank]

    def lightness(self, rank: int, action: Action) -> float:
        """0 for the first stage of the rank up to 1 for the last."""
        return self._index[rank][action.stage] / max(self.most - 1, 1)

    def label(self, step: Step) -> str:
        """The short name of a step: with its stage only where ranks hold several."""
        if isinstance(step, FusedPair):
            return ";".join(map(self.label, flatten(step)))
        return str(step) if self.most > 1 else f"{step.kind}{step.microbatch}"


def fill(kind: Kind, lightness: float = 0.0) -> str:
    """The colour of a kind, "#rrggbb"; lightness from 0 to 1, see `Chunks.lightness`."""
    mix = 0.42 * lightness
    channels = (int(_FILL[kind][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * mix):02x}" for value in channels)


def ink(background: str) -> str:
    """Text that reads on this colour: white on dark ones."""
    red, green, blue = (int(background[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#ffffff" if luminance < 0.3 else INK
