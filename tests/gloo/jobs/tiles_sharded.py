"""Jobs whose stages are cut over ranks, and whose boundaries are crossed in tiles."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jobs.fused import tensor_ranks
from jobs.injections import strike
from jobs.tiles import CLOSE
from jobs.unsplit import LOSS, expected, unsplit
from npu_pipe import MeanLoss, NpuPipeError, Pipeline, Schedule, World, build_schedule
from npu_pipe.launch.mesh import Mesh
from npu_pipe.ops.operators import Operators
from npu_pipe_kernels.linear import ColumnParallelLinear, RowParallelLinear
from npu_pipe_kernels.llama import cut_whole, load_whole
from npu_pipe_kernels.providers import providers
from npu_pipe_kernels.sharding import Sequence as Tokens
from npu_pipe_kernels.sharding import Sharding
from npu_pipe_kernels.tiled import tiled

WIDTH, HIDDEN, MICROBATCHES, TILES = 8, 16, 4, 3


def stage(index: int) -> nn.Sequential:
    """The unsplit one: its first and its last product are every rank's own."""
    torch.manual_seed(index)
    sizes = ((WIDTH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH, WIDTH))
    first, *others = (nn.Linear(*size, dtype=torch.float64) for size in sizes)
    return nn.Sequential(first, nn.Tanh(), *others)


def cut(whole: nn.Sequential, sharding: Sharding) -> nn.Sequential:
    parts = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        ColumnParallelLinear(WIDTH, HIDDEN, sharding, bias=True),
        RowParallelLinear(HIDDEN, WIDTH, sharding, bias=True),
        nn.Linear(WIDTH, WIDTH),
    ).double()
    load_whole(parts, dict(whole.named_parameters()))
    return parts


@contextmanager
def pipelines(
    world: World, schedule: Schedule, *, limit_s: float = 20
) -> Iterator[tuple[Pipeline, Mapping[int, nn.Module]]]:
    """Two side by side, over layers that are cut in two; and the stages that were given."""
    mesh = Mesh(pp=world.size // 2, tp=2)
    pipeline = mesh.pipeline_world(world)
    with tensor_ranks(world, mesh, "cpu") as ranks:
        sharding = Sharding(Operators(ranks, providers()), Tokens.WHOLE)
        mine = {i: cut(stage(i), sharding) for i in schedule.stages_of(pipeline.rank)}
        stages, link = tiled(mine, schedule=schedule, tiles=TILES)
        with Pipeline(
            stages,
            schedule=schedule,
            loss=MeanLoss(LOSS),
            world=pipeline,
            timeout_s=limit_s,
            tensor_parallel=ranks,
            link=link,
        ) as pipe:
            yield pipe, mine


def batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    inputs, targets = torch.randn(2, MICROBATCHES * rows, WIDTH, dtype=torch.float64)
    return inputs, targets


def trains(world: World, *, name: str) -> None:
    """Losses and gradients of two steps are the unsplit model's."""
    schedule = build_schedule(name, ranks=world.size // 2, microbatches=MICROBATCHES)
    wholes = [stage(index) for index in range(schedule.stages)]
    wanted = unsplit(wholes, batch(5), microbatches=MICROBATCHES)
    with pipelines(world, schedule) as (pipe, mine):
        for _ in range(2):
            for module in mine.values():
                module.zero_grad()
            assert math.isclose(pipe.step(batch(5)).loss, wanted.loss, rel_tol=1e-12)
        assert type(pipe._link).__name__ == "TiledLink"
    for index, module in mine.items():
        sums = expected(schedule, wanted.gradients[index], index)
        names = [each for each, _ in wholes[index].named_parameters()]
        parts = cut_whole(module, dict(zip(names, sums, strict=True)))
        for each, parameter in module.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, parts[each], **CLOSE), (index, each)


def killed(world: World, *, rank: int, note: str) -> dict[str, Any]:
    """A process is killed when one tile of three has gone."""
    schedule = build_schedule("1f1b", ranks=world.size // 2, microbatches=MICROBATCHES)
    try:
        with pipelines(world, schedule, limit_s=8) as (pipe, _):
            pipe.step(batch(6))
            if world.rank == rank:
                port = next(iter(pipe._modules.values()))[-1].after
                send = port.send

                def once(end: int) -> None:
                    if end > 2:
                        strike("kill", 8, Path(note))
                    send(end)

                port.send = once
            pipe.step(batch(6))
    except NpuPipeError as error:
        seconds = time.monotonic() - float(Path(note).read_text())
        return {"text": f"{type(error).__name__}: {error}", "seconds": seconds}
    raise AssertionError("nobody has failed")


def holds(world: World, *, rows: int, steps: Sequence[int]) -> list[dict[str, int]]:
    """Tensors, and bytes of the process, after each of these numbers of steps."""
    schedule = build_schedule("zb-v", ranks=world.size // 2, microbatches=MICROBATCHES)
    found = []
    with pipelines(world, schedule) as (pipe, _):
        for step in range(1, max(steps) + 1):
            pipe.step(batch(rows))
            if step not in steps:
                continue
            gc.collect()
            kinds = map(type, gc.get_objects())  # isinstance would wake what only looks like one
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            found.append(
                {
                    "tensors": sum(issubclass(kind, Tensor) for kind in kinds),
                    "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
                }
            )
    return found
