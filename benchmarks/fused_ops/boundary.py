"""The boundary kernels: what two stages and the transfer between them take, by number of tiles.

rank 0   | product |                       one microbatch, forward: a leg
wire               |  transfer  |
rank 1                          | product |
                                | product |    and the input gradient back: another
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from slow_products import SlowProducts, covered_us
from torch import nn

from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm.links import OpenLink, fastest_link, paced
from npu_pipe.comm.shared import Pace
from npu_pipe.ops.tile_costs import TileCosts, best_tiles, tiled_us
from npu_pipe_kernels.tiled import tiled

__all__ = ["LADDER", "Leg", "boundary_cases"]

LADDER = (1, 2, 4, 8, 16, 32)
ROWS, WIDTH, NARROW = 512, 64, 8
BYTES = ROWS * WIDTH * 4
_FREE, _CALIBRATED = 0, 32  # the run that tells what a tile costs, and its tiles


@dataclass(frozen=True, slots=True)
class Leg:
    """took_us: from the start of the first product to the end of the second. shown_us: of that,
    while neither rank multiplied. made_us, used_us: in the two products."""

    took_us: float
    shown_us: float
    made_us: float
    used_us: float


def boundary_cases(
    world: World, *, wires: dict[str, Pace], product_ms: float, steps: int
) -> list[dict[str, Any]]:
    """Forward and backward of each wire; collective, and alike on both ranks."""
    slow = SlowProducts(us_per_row=product_ms * 1e3 / ROWS, width=WIDTH)
    cases = []
    for wire, pace in wires.items():
        with ExitStack() as stack:
            pipes = {
                tiles: stack.enter_context(open_pipe(world, tiles, paced(pace))) for tiles in LADDER
            }
            pipes[_FREE] = stack.enter_context(open_pipe(world, _CALIBRATED, fastest_link))
            legs = measure(pipes, slow, steps=steps)
        for number, way in enumerate(("forward", "backward")):
            found = {name: _median([each[number] for each in legs[name]]) for name in legs}
            tile_us = _tile_us(found[1], found.pop(_FREE))
            cases.append(_case(f"boundary {way}, {wire}", found, pace, tile_us))
    return cases


def open_pipe(world: World, tiles: int, link: OpenLink) -> Pipeline:
    """With one tile it is a pipeline as any other."""
    torch.manual_seed(0)
    schedule = build_schedule("zb-h1", ranks=2, microbatches=1)
    stages: dict[int, nn.Module] = {
        0: nn.Sequential(nn.Linear(NARROW, WIDTH), nn.Linear(WIDTH, WIDTH)),
        1: nn.Sequential(nn.Linear(WIDTH, WIDTH)),
    }
    mine = {world.rank: stages[world.rank]}
    if tiles > 1:
        mine, link = tiled(mine, schedule=schedule, tiles=tiles, link=link)
    loss = MeanLoss(nn.functional.mse_loss)
    return Pipeline(mine, schedule=schedule, loss=loss, world=world, link=link)


def measure(
    pipes: dict[int, Pipeline], slow: SlowProducts, *, steps: int
) -> dict[int, list[tuple[Leg, Leg]]]:
    """In turn, so that a busy moment of the machine falls on all alike; the first step is not
    counted, in which forms are told."""
    batch = torch.randn(ROWS, NARROW), torch.zeros(ROWS, WIDTH)
    legs: dict[int, list[tuple[Leg, Leg]]] = {tiles: [] for tiles in pipes}
    for step in range(steps + 1):
        for tiles, pipe in pipes.items():
            slow.spans.clear()
            with slow:
                pipe.step(batch)
            first, second = pipe.gather(slow.spans)
            if step:
                there, back = len(first) // 2, len(second) // 2
                legs[tiles].append(
                    (_leg(first[:there], second[:back]), _leg(second[back:], first[there:]))
                )
    return legs


def _leg(made: Sequence[Sequence[float]], used: Sequence[Sequence[float]]) -> Leg:
    start_us, end_us = made[0][0], used[-1][1]
    spans = [(begin, end) for begin, end in (*made, *used)]
    took_us = end_us - start_us
    made_us, used_us = (sum(end - begin for begin, end in each) for each in (made, used))
    return Leg(took_us, took_us - covered_us(spans, start_us, end_us), made_us, used_us)


def _median(legs: Sequence[Leg]) -> Leg:
    names = ("took_us", "shown_us", "made_us", "used_us")
    return Leg(*(statistics.median(getattr(leg, name) for leg in legs) for name in names))


def _tile_us(whole: Leg, cut: Leg) -> float:
    """What a tile costs at either end, beyond its share of the product.

    cut: in tiles over memory, where the wire takes nothing. There n tiles of two products of P
    take P + P / n, and n + 1 times what a tile costs.
    """
    slower, faster = max(whole.made_us, whole.used_us), min(whole.made_us, whole.used_us)
    without_us = slower + faster / _CALIBRATED
    return max(0.0, (cut.took_us - without_us) / (_CALIBRATED + 1))


def _case(name: str, legs: dict[int, Leg], pace: Pace, tile_us: float) -> dict[str, Any]:
    whole = legs[1]
    costs = TileCosts(
        made_us=whole.made_us,
        used_us=whole.used_us,
        latency_us=pace.latency_us,
        wire_us=BYTES / pace.bytes_per_us,
        made_tile_us=tile_us,
        used_tile_us=tile_us,
    )
    predicted = best_tiles(costs, most=max(LADDER), steps=LADDER)
    best = min(LADDER, key=lambda tiles: legs[tiles].took_us)
    return {
        "case": f"{name}, {best} tiles",
        "ours": legs[best].took_us / 1e3,
        "peer": whole.took_us / 1e3,
        "unit": "ms",
        "ratio": legs[best].took_us / whole.took_us,
        "hidden": 1 - legs[best].shown_us / whole.shown_us,
        "predicted_tiles": predicted,
        "best_tiles": best,
        "steps_apart": abs(LADDER.index(predicted) - LADDER.index(best)),
        "tile_us": tile_us,
        "by_tiles": [
            {
                "tiles": tiles,
                "ms": leg.took_us / 1e3,
                "predicted_ms": tiled_us(costs, tiles) / 1e3,
                "hidden": 1 - leg.shown_us / whole.shown_us,
            }
            for tiles, leg in legs.items()
        ],
    }
