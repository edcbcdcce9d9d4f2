"""Jobs with boundaries in tiles where something is unusual, or goes wrong."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from jobs.injections import LINKS, strike
from jobs.tiles import CLOSE, WIDTH, stage
from jobs.unsplit import LOSS
from npu_pipe import MeanLoss, NpuPipeError, Pipeline, World, build_schedule
from npu_pipe.comm.links import paced
from npu_pipe.comm.shared import Pace
from npu_pipe_kernels.boundary_layer import BoundaryLinear
from npu_pipe_kernels.tile_choice import Measured
from npu_pipe_kernels.tiled import tiled


def pipe_of(
    world: World,
    modules: list[nn.Module],
    *,
    name: str = "1f1b",
    microbatches: int = 4,
    tiles: Any = 3,
    link: Any = None,
    timeout_s: float = 8,
) -> Pipeline:
    """tiles: 0 for none at all."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    mine = {i: modules[i] for i in schedule.stages_of(world.rank)}
    if tiles:
        mine, link = tiled(mine, schedule=schedule, tiles=tiles, link=link)
    return Pipeline(
        mine,
        schedule=schedule,
        loss=MeanLoss(LOSS),
        world=world,
        link=link,
        timeout_s=timeout_s,
    )


def batch(rows: int, *others: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    inputs, targets = torch.randn(2, rows, *others, WIDTH, dtype=dtype)
    return inputs, targets


def linears(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(count)]


def struck(
    world: World, *, rank: int, fault: str, link: str, backward: bool, limit_s: float, note: str
) -> dict[str, Any]:
    """A fault between two tiles of microbatch 2 of the second step, in a product of one rank."""
    layer_of = {True: lambda layer: layer.before, False: lambda layer: layer.after}[backward]
    with redirect_stderr(io.StringIO()) as printed:
        try:
            with pipe_of(
                world,
                linears(world.size),
                microbatches=6,
                link=LINKS[link],
                timeout_s=limit_s,
            ) as pipe:
                pipe.step(batch(24))
                if world.rank == rank:
                    layer = pipe._modules[rank]
                    assert isinstance(layer, BoundaryLinear)
                    port, sent = layer_of(layer), []
                    send = port.send

                    def hit(end: int) -> None:
                        sent.append(end)
                        if (
                            len(sent) == 2 * 3 + 2
                        ):  # three tiles a microbatch; the second of the third
                            strike(fault, limit_s, Path(note))
                        send(end)

                    port.send = hit
                pipe.step(batch(24))
        except (NpuPipeError, ValueError) as error:
            return {
                "error": type(error).__name__,
                "text": str(error),
                "seconds": time.monotonic() - float(Path(note).read_text()),
                "printed": printed.getvalue(),
            }
    raise AssertionError("nobody has failed")


def resets(world: World) -> dict[str, Any]:
    """Every rank catches the error of a product that breaks between two tiles, and goes on."""
    said = ""
    modules = linears(world.size)
    with pipe_of(world, modules) as pipe:
        losses = [pipe.step(batch(8)).loss]
        layer = pipe._modules[world.rank]
        if world.rank == 0:
            port, send = layer.after, layer.after.send

            def fail(end: int) -> None:
                if end > 1:
                    port.send = send
                    raise ValueError("the second tile is broken")
                send(end)

            port.send = fail
        try:
            pipe.step(batch(8))
        except (NpuPipeError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        pipe.reset()
        for _ in range(2):
            modules[world.rank].zero_grad()
            losses.append(pipe.step(batch(8)).loss)
        with torch.inference_mode():
            losses.append(pipe.evaluate(batch(8)).loss)
        losses.append(pipe.step(batch(8)).loss)
        in_use = pipe._link.in_use
    return {"said": said, "losses": losses, "in_use": in_use}


def shapes_change(world: World) -> list[float]:
    """Losses of batches of many shapes, tiled and not; rows that do not divide among them."""
    found = []
    for tiles in (3, 0):
        with pipe_of(world, [stage(i) for i in range(world.size)], tiles=tiles) as pipe:
            found.append(
                [
                    pipe.step(batch(*shape)).loss
                    for shape in ((8,), (10,), (8, 3), (4, 2, 2), (8,), (9, 2))
                    for _ in range(2)
                ]
            )
    return [abs(ours - theirs) for ours, theirs in zip(*found, strict=True)]


def frozen(world: World, *, name: str) -> list[Any]:
    """The first stage is frozen, so that no gradient crosses the first boundary, and the bias of
    the second. Whether the gradients are those of the untiled run."""
    found = []
    for tiles in (3, 0):
        schedule = build_schedule(name, ranks=world.size, microbatches=4)
        modules = [stage(i) for i in range(schedule.stages)]
        modules[0].requires_grad_(False)
        modules[1].bias.requires_grad_(False)
        with pipe_of(world, modules, name=name, tiles=tiles) as pipe:
            for _ in range(2):
                pipe.step(batch(12))
            mine = [modules[i] for i in schedule.stages_of(world.rank)]
        found.append([p.grad for module in mine for p in module.parameters()])
    return [
        ours is None if theirs is None else torch.allclose(ours, theirs, **CLOSE)
        for ours, theirs in zip(*found, strict=True)
    ]


def autocast(world: World, *, name: str) -> list[float]:
    """Relative differences of gradients between a tiled and an untiled run in bfloat16."""
    found = []
    for tiles in (3, 0):
        schedule = build_schedule(name, ranks=world.size, microbatches=4)
        modules = [stage(i).float() for i in range(schedule.stages)]
        with pipe_of(world, modules, name=name, tiles=tiles) as pipe:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for _ in range(2):
                    pipe.step(batch(16, dtype=torch.float32))
            mine = [modules[i] for i in schedule.stages_of(world.rank)]
        found.append([p.grad for module in mine for p in module.parameters()])
    return [
        float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(*found, strict=True)
    ]


def begins_early(world: World) -> dict[str, float]:
    """By a slow wire: how long before the last part came 1F1 began, in milliseconds."""
    pace = Pace(latency_us=100, bytes_per_us=8 * WIDTH * 24 / 60e3)  # 60 ms for a value
    with pipe_of(world, linears(2), microbatches=2, tiles=6, link=paced(pace)) as pipe:
        for _ in range(2):
            pipe.step(batch(48))
        timeline = pipe.timeline()
    starts = {str(span.action): span.start_us for span in timeline.compute}
    ends = {str(span.action): span.end_us for span in timeline.compute}
    there = {str(span.action): span.end_us for span in timeline.transfers}
    waits = sum(span.end_us - span.start_us for span in timeline.waits if span.rank == 1)
    return {
        "early_ms": (there["1RECV_F1"] - starts["1F1"]) / 1e3,
        "ends_after_ms": (ends["1F1"] - there["1RECV_F1"]) / 1e3,
        "waited_ms": waits / 1e3,
    }


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.layer(x), 1


def refused(world: World, *, case: str) -> str:
    """What this rank was told."""
    modules = linears(world.size)
    tiles: Any = 3
    if case == "no linear layer":
        modules = [nn.Sequential(each, nn.Tanh()) for each in modules]
        modules = [nn.Sequential(nn.Tanh(), each) for each in modules]
        tiles = {0: 3}
    if case == "a hook":
        for each in modules:
            each.register_forward_hook(lambda module, given, made: made * 2)
        tiles = {0: 3}
    if case == "others":
        tiles = {0: 3 + world.rank}
    if case == "others measured":
        tiles = Measured(rows=2 + world.rank)
    if case == "one rank measures":
        tiles = Measured(rows=2) if world.rank == 0 else 3
    if case == "one rank":
        tiles = 3 if world.rank == 0 else 0
    if case == "none":
        tiles = {0: 0}
    if case == "no boundary":
        tiles = {7: 2}
    if case == "two values":
        modules[0] = Pair()
    hooks = []
    try:
        with pipe_of(world, modules, tiles=tiles) as pipe:
            pipe.step(batch(8))
            if case == "a late hook on all modules" and world.rank == 0:
                hooks.append(register_module_forward_hook(lambda module, given, made: made * 2))
            if case == "a late hook" and world.rank == 0:
                pipe._modules[0].register_forward_hook(lambda module, given, made: made * 2)
            if case == "a late hook on the given stage" and world.rank == 0:
                modules[0].register_forward_pre_hook(lambda module, given: None)
            pipe.step(batch(8))
    except NpuPipeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for hook in hooks:
            hook.remove()
    return "ran"


def left_alone(world: World) -> list[str]:
    """The link where there is nothing to cut."""
    found = []
    for modules, tiles in (
        ([nn.Sequential(nn.Tanh(), each, nn.Tanh()) for each in linears(world.size)], 3),
        (linears(world.size), 1),
        (linears(world.size), 3),
    ):
        with pipe_of(world, modules, tiles=tiles) as pipe:
            pipe.step(batch(8))
            found.append(type(pipe._link).__name__)
    return found


def memory_is_used_again(world: World) -> list[int]:
    """Buffers after each of 20 steps; and whether footprints can be measured."""
    counts = []
    with pipe_of(world, linears(world.size), microbatches=8) as pipe:
        for _ in range(20):
            pipe.step(batch(16))
            counts.append(pipe._link.buffers)
        with pipe.watching_memory():
            pipe.step(batch(16))
        assert pipe.footprint().held_bytes[world.rank] > 0
    return counts
