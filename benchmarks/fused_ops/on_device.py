"""The same table on the devices of this machine: real products, and the link as it is.

What is needed for a prediction is measured with as little: a product alone; the transfer, of the
whole and of a few rows, as what a step takes beside its products; and one run with many tiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from boundary import LADDER, case_of
from torch import nn

from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm.links import OpenLink, link_for, staged_link
from npu_pipe.device.device import Device
from npu_pipe.ops.need import Need, Operator
from npu_pipe.ops.provider import Provider
from npu_pipe.ops.ranks import ranks_of
from npu_pipe.ops.reference import Reference
from npu_pipe.ops.tile_costs import TileCosts, fitted
from npu_pipe_kernels.portable import Portable
from npu_pipe_kernels.providers import providers
from npu_pipe_kernels.tiled import tiled

__all__ = ["boundary_cases_on", "operator_cases_on"]

_NARROW = 8  # the width of the input, whose product takes no time
_FEW = 16  # rows that take the latency only
_REPEATS = 20


def boundary_cases_on(
    device: Device, world: World, *, rows: int, width: int, is_shared: bool, steps: int
) -> list[dict[str, Any]]:
    """Forward and backward; collective."""
    with ExitStack() as stack:
        pipes = {
            tiles: stack.enter_context(
                _open(device, world, width=width, tiles=tiles, is_shared=is_shared)
            )
            for tiles in LADDER
        }
        few = _legs({1: pipes[1]}, device, (_FEW, width), steps=steps)[1]
        found = _legs(pipes, device, (rows, width), steps=steps)
    product_us = _product_us(device, rows, width)
    few_us = _product_us(device, _FEW, width)
    cases = []
    for number, way in enumerate(("forward", "backward")):
        took_us = {tiles: each[number] for tiles, each in found.items()}
        latency_us = max(0.0, few[number] - 2 * few_us)
        costs = TileCosts(
            made_us=product_us,
            used_us=product_us,
            latency_us=latency_us,
            wire_us=max(0.0, took_us[1] - 2 * product_us - latency_us),
        )
        costs = fitted(costs, tiles=max(LADDER), took_us=took_us[max(LADDER)])
        cases.append(case_of(f"boundary {way}, {rows} x {width}", took_us, costs, LADDER))
    return cases


def operator_cases_on(
    device: Device, group: dist.ProcessGroup, *, rows: int, width: int, steps: int
) -> list[dict[str, Any]]:
    """Every provider that serves, and the portable one by its tiles, against the reference."""
    ranks = ranks_of(group, device.place)
    right = torch.randn(width, width, device=device.place, dtype=_dtype(device))
    part = torch.randn(rows // ranks.size, width, device=device.place, dtype=_dtype(device))
    whole = torch.randn(rows, width, device=device.place, dtype=_dtype(device))
    cases = []
    for operator, left in (
        (Operator.ALL_GATHER_MATMUL, part),
        (Operator.MATMUL_REDUCE_SCATTER, whole),
    ):
        need = Need(operator, left.shape[0], width, width, left.dtype)
        serving: dict[str, Provider] = {
            f"portable, {tiles} tiles": Portable(tiles) for tiles in LADDER
        }
        for each in providers():
            if each.kind == device.place.type and each.refusal(need, ranks) is None:
                serving[each.name] = each
        runs: dict[str, Callable[[], object]] = {
            name: partial(getattr(each, operator.value), left, right, ranks)
            for name, each in {"reference": Reference(), **serving}.items()
        }
        runs["products"] = partial(torch.mm, torch.empty(rows, width).to(right), right)
        took = _in_turn(runs, device, group, steps=steps)
        unfused_us, products_us = took.pop("reference"), took.pop("products")
        for name, took_us in took.items():
            cases.append(
                {
                    "case": f"{operator}, {name}",
                    "ours": took_us / 1e3,
                    "peer": unfused_us / 1e3,
                    "unit": "ms",
                    "ratio": took_us / unfused_us,
                    "hidden": (unfused_us - took_us) / max(unfused_us - products_us, 1e-3),
                }
            )
    return cases


def _open(device: Device, world: World, *, width: int, tiles: int, is_shared: bool) -> Pipeline:
    torch.manual_seed(0)
    schedule = build_schedule("zb-h1", ranks=2, microbatches=1)
    narrow = nn.Linear(8, width)
    layers = [
        nn.Sequential(narrow, nn.Linear(width, width)),
        nn.Sequential(nn.Linear(width, width)),
    ]
    mine: dict[int, nn.Module] = {
        world.rank: layers[world.rank].to(device.place, dtype=_dtype(device))
    }
    link: OpenLink = link_for(mine.values(), schedule=schedule)
    if is_shared:
        link = staged_link(device, schedule=schedule)
    if tiles > 1:
        mine, link = tiled(mine, schedule=schedule, tiles=tiles, link=link)
    loss = MeanLoss(nn.functional.mse_loss)
    return Pipeline(mine, schedule=schedule, loss=loss, world=world, link=link, timeout_s=60)


def _legs(
    pipes: dict[int, Pipeline], device: Device, shape: tuple[int, int], *, steps: int
) -> dict[int, tuple[float, float]]:
    """Microseconds from the first product to the end of the second, there and back; medians."""
    rows, width = shape
    batch = (
        torch.randn(rows, _NARROW, device=device.place, dtype=_dtype(device)),
        torch.zeros(rows, width, device=device.place, dtype=_dtype(device)),
    )
    found: dict[int, list[tuple[float, float]]] = {tiles: [] for tiles in pipes}
    for step in range(steps + 2):
        for tiles, pipe in pipes.items():
            pipe.step(batch)
            spans = {str(span.action): span for span in pipe.timeline().compute}
            there = spans["1F0"].end_us - spans["0F0"].start_us
            back = spans["0I0"].end_us - spans["1I0"].start_us
            if step > 1:
                found[tiles].append((there, back))
    return {
        tiles: (statistics.median(t for t, _ in each), statistics.median(b for _, b in each))
        for tiles, each in found.items()
    }


def _product_us(device: Device, rows: int, width: int) -> float:
    x, weight = (
        torch.randn(size, width, device=device.place, dtype=_dtype(device))
        for size in (rows, width)
    )
    with torch.no_grad():
        return _median_us(lambda: nn.functional.linear(x, weight), device)


def _in_turn(
    runs: dict[str, Callable[[], object]],
    device: Device,
    group: dist.ProcessGroup,
    *,
    steps: int,
) -> dict[str, float]:
    """The median over the steps, the mean over the ranks."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(steps + 2):
        for name, run in runs.items():
            dist.barrier(group)
            took_us = _median_us(run, device, repeats=1)
            if step > 1:
                found[name].append(took_us)
    table = torch.tensor([statistics.median(each) for each in found.values()], device=device.place)
    dist.all_reduce(table, group=group)
    return dict(zip(found, (table / group.size()).tolist(), strict=True))


def _median_us(run: Callable[[], object], device: Device, *, repeats: int = _REPEATS) -> float:
    took = []
    for _ in range(repeats + (repeats > 1)):
        device.synchronize()
        start = time.perf_counter()
        run()
        device.synchronize()
        took.append((time.perf_counter() - start) * 1e6)
    return statistics.median(took[repeats > 1 :])


def _dtype(device: Device) -> torch.dtype:
    return torch.float32 if device.place.type == "cpu" else torch.bfloat16
