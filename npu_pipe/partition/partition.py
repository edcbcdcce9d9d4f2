"""Cut a list of layers into stages that cost about the same.

    layer costs   1 4 4 4 4 4 4 4 4 2      4 stages
    stages       |1 4 4|4 4|4 4 |4 4 2|    9 8 8 10: the largest is as small as it can be

Two passes of the same recurrence over (stages used, layers used): the first finds the smallest
possible largest stage, the second the most even cut that keeps to it. Evenness is the smallest
sum of squared stage costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from npu_pipe.errors import PartitionError
from npu_pipe.simulator.numbers import is_cost

__all__ = ["partition"]

Floats = npt.NDArray[np.float64]


def partition(layer_costs: Sequence[float], *, stages: int) -> tuple[range, ...]:
    """The layers of each stage, in order; each stage has at least one.

    layer_costs: one a layer, in any unit.
    Raises PartitionError when there are fewer layers than stages, or a cost is negative or
    not finite.
    """
    _check(layer_costs, stages)
    prefix = np.concatenate(([0.0], np.cumsum(np.asarray(layer_costs, dtype=np.float64))))
    piece = prefix[None, :] - prefix[:, None]  # [i, j]: the cost of layers i..j-1
    piece[np.tri(len(prefix), dtype=bool)] = np.inf  # a stage has a layer
    largest, _ = _best_cut(piece, stages, np.maximum)
    allowed = np.where(piece <= largest, piece / (largest or 1.0), np.inf)
    _, cuts = _best_cut(allowed**2, stages, np.add)
    return tuple(map(range, cuts, cuts[1:]))


def _best_cut(
    piece: Floats, stages: int, join: Callable[[Floats, Floats], Floats]
) -> tuple[float, list[int]]:
    """The least joined value of all pieces, and where the pieces begin and end."""
    best = np.full(len(piece), np.inf)
    best[0] = 0.0
    chosen = []
    for _ in range(stages):
        table = join(best[:, None], piece)
        chosen.append(np.argmin(table, axis=0))
        best = np.min(table, axis=0)
    cuts = [len(piece) - 1]
    for begin in reversed(chosen):
        cuts.append(int(begin[cuts[-1]]))
    return float(best[-1]), cuts[::-1]


def _check(layer_costs: Sequence[float], stages: int) -> None:
    if type(stages) is not int or stages < 1:
        raise PartitionError(
            "a model is cut into one stage or more",
            f"{stages!r} were asked for",
            "give stages >= 1",
        )
    if len(layer_costs) < stages:
        raise PartitionError(
            "each stage holds at least one layer",
            f"{len(layer_costs)} layers were given for {stages} stages",
            f"use at most {len(layer_costs)} stages (ranks x chunks), or a model of more layers",
        )
    for layer, cost in enumerate(layer_costs):
        if not is_cost(cost):
            raise PartitionError(
                "layer costs are finite and not negative, and at most 1e30",
                f"layer {layer} costs {cost}",
                "measure it again",
            )
