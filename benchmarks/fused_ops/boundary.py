"""The boundary kernels: what two stages and the transfer between them take, by number of tiles.

rank 0   | product |                       one microbatch, forward: a leg
wire               |  transfer  |
rank 1                          | product |
                                | product |    and the input gradient back: another
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from slow_products import SlowProducts, covered_us
from torch import nn

from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm.links import OpenLink, fastest_link, paced
from npu_pipe.comm.shared import Pace
from npu_pipe.ops.tile_costs import TileCosts, best_tiles, fitted, hidden_share, tiled_us
from npu_pipe_kernels.tiled import tiled

__all__ = ["BYTES", "LADDER", "boundary_cases", "case_of"]

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
            cases.append(_case(f"boundary {way}, {wire}", found, pace))
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


def _case(name: str, legs: dict[int, Leg], pace: Pace) -> dict[str, Any]:
    """What a tile costs is known from the run over memory, where the wire takes nothing."""
    whole, free = legs[1], legs.pop(_FREE)
    costs = TileCosts(made_us=whole.made_us, used_us=whole.used_us, latency_us=0, wire_us=0)
    costs = replace(
        fitted(costs, tiles=_CALIBRATED, took_us=free.took_us),
        latency_us=pace.latency_us,
        wire_us=BYTES / pace.bytes_per_us,
    )
    hidden = {tiles: 1 - leg.shown_us / whole.shown_us for tiles, leg in legs.items()}
    took_us = {tiles: leg.took_us for tiles, leg in legs.items()}
    return case_of(name, took_us, costs, LADDER, hidden=hidden)


def case_of(
    name: str,
    took_us: Mapping[int, float],
    costs: TileCosts,
    ladder: Sequence[int],
    *,
    unfused_us: float | None = None,
    hidden: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """took_us: by the number of tiles. unfused_us: where that is not one tile. hidden: shares,
    where it was seen; else by what it all took."""
    peer_us = took_us[1] if unfused_us is None else unfused_us
    if hidden is None:
        hidden = {tiles: hidden_share(costs, took) for tiles, took in took_us.items()}
    predicted = best_tiles(costs, most=max(ladder), steps=ladder)
    best = min(ladder, key=lambda tiles: took_us[tiles])
    return {
        "case": f"{name}, {best} tiles",
        "ours": took_us[best] / 1e3,
        "peer": peer_us / 1e3,
        "unit": "ms",
        "ratio": took_us[best] / peer_us,
        "hidden": hidden[best],
        "predicted_tiles": predicted,
        "best_tiles": best,
        "steps_apart": abs(ladder.index(predicted) - ladder.index(best)),
        "tile_us": max(costs.made_tile_us, costs.used_tile_us),
        "by_tiles": [
            {
                "tiles": tiles,
                "ms": took / 1e3,
                "predicted_ms": tiled_us(costs, tiles) / 1e3,
                "hidden": hidden[tiles],
            }
            for tiles, took in took_us.items()
        ],
    }
