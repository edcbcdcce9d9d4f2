"""How many tiles: what a product and a transfer beside it take when they are cut into rows.

    made      |t0|t1|t2|t3|              a product in tiles
    wire         |t0|t1|t2|t3|           each sent while the next is computed: one after the other
    used               |t0|t1|t2|t3|     the next product, on each as it arrives, a latency later

More tiles hide more, and each costs something. Three machines in a row work on equal pieces, so
the last tile is ready when the first has passed all three and the slowest has done the others.
Where one rank has rows of its own beside, it multiplies those meanwhile:

    all_gather_matmul         nothing is made    own rows, then the others' as they arrive are used
    matmul_reduce_scatter     others' rows are made, then own ones    nothing is used
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from npu_pipe.errors import ConfigError

__all__ = ["TileCosts", "best_tiles", "fitted", "hidden_share", "tiled_us"]


@dataclass(frozen=True, slots=True)
class TileCosts:
    """What a transfer and the products next to it take, measured.

    made_us: the product of what is sent. used_us: the product of what has come. made_tile_us,
    used_tile_us: what each tile costs there beyond its share of the product. latency_us: from the
    end of a tile's sending to its arrival. wire_us: the bytes of the whole on the wire.
    wire_tile_us: what each message occupies the wire for beyond its bytes. own_us: the product of
    rows that do not travel, on the rank that makes or uses the others; 0 between two stages.
    Raises ConfigError for what is negative or no number.
    """

    made_us: float
    used_us: float
    latency_us: float
    wire_us: float
    made_tile_us: float = 0.0
    used_tile_us: float = 0.0
    wire_tile_us: float = 0.0
    own_us: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 <= value < math.inf:  # False for NaN
                raise ConfigError(
                    "a cost of tiles is 0 microseconds or more",
                    f"{name} is {value}",
                    "give what was measured",
                )


def tiled_us(costs: TileCosts, tiles: int) -> float:
    """From the start of the first product to the end of the last."""
    made = costs.made_us / tiles + costs.made_tile_us
    wire = costs.wire_us / tiles + costs.wire_tile_us
    used = costs.used_us / tiles + costs.used_tile_us
    travelled = made + wire + costs.latency_us + used + (tiles - 1) * max(made, wire, used)
    return max(travelled, costs.own_us + tiles * max(made, used))


def best_tiles(costs: TileCosts, *, most: int, steps: Iterable[int] | None = None) -> int:
    """The number of tiles for which `tiled_us` is least, from 1 to `most`; the smallest of equals.

    steps: the numbers that come into question; None for all.
    """
    if steps is not None:
        among = sorted({tiles for tiles in steps if 1 <= tiles <= most} or {1})
        return min(among, key=lambda tiles: tiled_us(costs, tiles))
    # The largest of functions a + b / n + c * n is convex: it falls, and then rises.
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if tiled_us(costs, middle + 1) < tiled_us(costs, middle):
            low = middle + 1
        else:
            high = middle
    return low


def fitted(costs: TileCosts, *, tiles: int, took_us: float) -> TileCosts:
    """The costs, with what each tile costs at a product such that this many take `took_us`; 0 where
    they take longer without.

    For one run with many tiles: what a tile costs is made of many small things.
    """
    low_us, high_us = 0.0, took_us

    def cost(tile_us: float) -> TileCosts:
        return replace(
            costs,
            made_tile_us=tile_us if costs.made_us else 0.0,
            used_tile_us=tile_us if costs.used_us else 0.0,
        )

    for _ in range(60):
        middle_us = (low_us + high_us) / 2
        if tiled_us(cost(middle_us), tiles) < took_us:
            low_us = middle_us
        else:
            high_us = middle_us
    return cost(low_us)


def hidden_share(costs: TileCosts, took_us: float) -> float:
    """Of the transfer's time, the share that does not show, where all took `took_us`.

    Unhidden, the transfer stands between the products, which take their time one after the other.
    """
    transfer_us = costs.wire_us + costs.wire_tile_us + costs.latency_us
    shown_us = took_us - costs.made_us - costs.used_us - costs.own_us
    return 1 - shown_us / transfer_us if transfer_us else 1.0
