"""The fused products of tensor-parallel layers: the portable provider against the reference.

all_gather_matmul        reference   | transfer |     all rows     |
                         portable    | own rows | others' as they arrive |
matmul_reduce_scatter    reference   |     all rows     | transfer |
                         portable    | others', sent tile by tile | own rows |
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from boundary import case_of
from paced_group import paced_group
from slow_products import SlowProducts, covered_us
from torch import Tensor

from npu_pipe.comm.shared import Pace
from npu_pipe.ops.provider import Provider
from npu_pipe.ops.ranks import Ranks, ranks_of
from npu_pipe.ops.reference import Reference
from npu_pipe.ops.tile_costs import TileCosts, fitted
from npu_pipe.runtime.record import now_us
from npu_pipe_kernels.portable import Portable

__all__ = ["operator_cases"]

LADDER = (1, 2, 4, 8, 16)
ROWS, WIDTH = 512, 64  # of the product; a rank sends half of the rows
BYTES = ROWS // 2 * WIDTH * 4
_UNFUSED, _FREE, _CALIBRATED = -1, 0, 16

Product = Callable[[Provider, Ranks], object]


@dataclass(frozen=True, slots=True)
class Run:
    """took_us: of one product. shown_us: of that, while this rank did not multiply. products_us: in
    the products."""

    took_us: float
    shown_us: float
    products_us: float


def operator_cases(
    group: dist.ProcessGroup, *, wires: dict[str, Pace], product_ms: float, steps: int
) -> list[dict[str, Any]]:
    """Both products for each wire, of two ranks; collective.

    group: with a fast wire.
    """
    torch.manual_seed(0)
    right = torch.randn(WIDTH, WIDTH)
    part, whole = torch.randn(ROWS // 2, WIDTH), torch.randn(ROWS, WIDTH)
    products: dict[str, Product] = {
        "all_gather_matmul": lambda by, ranks: by.all_gather_matmul(part, right, ranks),
        "matmul_reduce_scatter": lambda by, ranks: by.matmul_reduce_scatter(whole, right, ranks),
    }
    slow = SlowProducts(us_per_row=product_ms * 1e3 / ROWS, width=WIDTH)
    place = torch.device("cpu")
    free = ranks_of(group, place)
    cases = []
    for wire, pace in wires.items():
        ranks = Ranks(group=paced_group(pace), rank=free.rank, size=free.size, place=place)
        for name, product in products.items():
            runs = {_UNFUSED: partial(product, Reference(), ranks)}
            runs[_FREE] = partial(product, Portable(_CALIBRATED), free)
            runs |= {tiles: partial(product, Portable(tiles), ranks) for tiles in LADDER}
            found = _measure(runs, slow, group, steps=steps)
            cases.append(_case(f"{name}, {wire}", found, pace, gathers=name.startswith("all")))
    return cases


def _measure(
    runs: dict[int, Callable[[], object]],
    slow: SlowProducts,
    group: dist.ProcessGroup,
    *,
    steps: int,
) -> dict[int, Run]:
    """In turn; the median over the steps and the mean over the ranks."""
    found: dict[int, list[Run]] = {name: [] for name in runs}
    for step in range(steps + 1):
        for name, run in runs.items():
            dist.barrier(group)
            slow.spans.clear()
            start_us = now_us()
            with slow:
                run()
            end_us = now_us()
            if step:
                busy_us = covered_us(slow.spans, start_us, end_us)
                took_us = end_us - start_us
                found[name].append(Run(took_us, took_us - busy_us, busy_us))
    table = torch.tensor(
        [
            [
                statistics.median(getattr(run, field) for run in each)
                for field in ("took_us", "shown_us", "products_us")
            ]
            for each in found.values()
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(table, group=group)
    means: Tensor = table / group.size()
    return {name: Run(*row.tolist()) for name, row in zip(found, means, strict=True)}


def _case(name: str, runs: dict[int, Run], pace: Pace, *, gathers: bool) -> dict[str, Any]:
    unfused, free = runs.pop(_UNFUSED), runs.pop(_FREE)
    half_us = unfused.products_us / 2
    costs = TileCosts(
        made_us=0 if gathers else half_us,
        used_us=half_us if gathers else 0,
        own_us=half_us,
        latency_us=0,
        wire_us=0,
    )
    costs = replace(
        fitted(costs, tiles=_CALIBRATED, took_us=free.took_us),
        latency_us=pace.latency_us,
        wire_us=BYTES / pace.bytes_per_us,
    )
    return case_of(
        name,
        {tiles: run.took_us for tiles, run in runs.items()},
        costs,
        LADDER,
        unfused_us=unfused.took_us,
        hidden={tiles: 1 - run.shown_us / unfused.shown_us for tiles, run in runs.items()},
    )
