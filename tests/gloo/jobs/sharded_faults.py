"""Jobs in which a rank of two pipelines that share their layers is at fault. What each rank raises
is the answer, and that all go on after a reset."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jobs.fused import tensor_ranks
from jobs.injections import arm, strike
from jobs.sharded import SMALL, batch_of, config_of, mean_loss
from npu_pipe import MeanLoss, NpuPipeError, Pipeline, World, build_schedule, partition
from npu_pipe.launch.mesh import Mesh
from npu_pipe.ops.operators import Operators
from npu_pipe.ops.ranks import Ranks
from npu_pipe.train.model import build_model
from npu_pipe.train.model_config import ModelConfig
from npu_pipe_kernels.llama import build_layers, load_whole
from npu_pipe_kernels.providers import providers
from npu_pipe_kernels.sharding import Sharding

MODEL = ModelConfig(**SMALL)
BATCH = batch_of(MODEL, 8, 6)


@contextmanager
def pipelines(
    world: World,
    *,
    name: str = "1f1b",
    limit_s: float = 8,
    told: bool = True,
    gain: float = 1.0,
) -> Iterator[tuple[Pipeline, Mapping[int, nn.Module], Ranks]]:
    """Two side by side, over layers that are cut in two. told: the pipeline that they are. gain: of
    the last norm, which both have."""
    mesh = Mesh(pp=world.size // 2, tp=2)
    schedule = build_schedule(name, ranks=mesh.pp, microbatches=4)
    pipeline = mesh.pipeline_world(world)
    whole = dict(build_model(MODEL, seed=3).named_parameters())
    parts = partition([1] * MODEL.layers, stages=schedule.stages)
    with tensor_ranks(world, mesh, "cpu") as ranks:
        sharding = Sharding(Operators(ranks, providers()))
        stages: dict[int, nn.Module] = {}
        for stage in schedule.stages_of(pipeline.rank):
            stages[stage] = build_layers(config_of(MODEL), parts[stage], sharding)
            load_whole(stages[stage], {**whole, "4.norm.weight": torch.full((MODEL.dim,), gain)})
        with Pipeline(
            stages,
            schedule=schedule,
            loss=MeanLoss(partial(mean_loss, ranks=ranks)),
            world=pipeline,
            timeout_s=limit_s,
            tensor_parallel=ranks if told else None,
        ) as pipe:
            yield pipe, stages, ranks


def goes_on_after(
    world: World, *, name: str, rank: int, action: str, fault: str, limit_s: float, note: str
) -> dict[str, Any]:
    """A rank is at fault at an action, or within a layer of it; every rank catches what it raised,
    resets, and goes on. Twice."""
    said, printed = [], io.StringIO()
    with (
        redirect_stderr(printed),
        pipelines(world, name=name, limit_s=limit_s) as (pipe, stages, _),
    ):
        losses = [pipe.step(BATCH).loss]
        for _ in range(2):
            if world.rank == rank:
                blow = partial(strike, fault, limit_s, Path(note))
                if action.startswith("layer"):
                    strike_within(stages, blow)
                else:
                    arm(pipe, action, blow)
            try:
                pipe.step(BATCH)
            except (NpuPipeError, ValueError) as error:
                said.append(
                    {
                        "text": f"{type(error).__name__}: {error}",
                        "seconds": time.monotonic() - float(Path(note).read_text()),
                    }
                )
            pipe.reset()
            for module in stages.values():
                module.zero_grad()
            losses.append(pipe.step(BATCH).loss)
        norm = pipe.clip_gradients(1e9)
    return {"losses": losses, "said": said, "norm": norm, "printed": printed.getvalue()}


def strike_within(stages: Mapping[int, nn.Module], blow: Callable[[], None]) -> None:
    """In the middle of a block, when its attention has exchanged rows already."""
    first = next(
        module
        for stage in stages.values()
        for name, module in stage.named_modules()
        if name.endswith("feed_forward")
    )

    def once(*_: object) -> None:
        handle.remove()
        blow()

    handle = first.register_forward_pre_hook(once)


def killed(world: World, *, rank: int, note: str) -> dict[str, Any]:
    """A process is killed within a layer."""
    try:
        with pipelines(world) as (pipe, stages, _):
            pipe.step(BATCH)
            if world.rank == rank:
                strike_within(stages, partial(strike, "kill", 8, Path(note)))
            pipe.step(BATCH)
    except NpuPipeError as error:
        seconds = time.monotonic() - float(Path(note).read_text())
        return {"text": f"{type(error).__name__}: {error}", "seconds": seconds}
    raise AssertionError("nobody has failed")


def mistaken(world: World, *, kind: str) -> dict[str, Any]:
    """Rank 1 makes a mistake that rank 0, with which it shares its layers, does not make."""
    odd = world.rank == 1
    said = ""
    try:
        with pipelines(
            world,
            name="gpipe" if kind == "another schedule" and odd else "1f1b",
            told=kind != "not told",
            gain=2.0 if kind == "another gain" and world.rank == 3 else 1.0,
        ) as (pipe, _, ranks):
            ids, targets = BATCH
            try:
                if kind == "another length" and odd:
                    pipe.step((ids[:, :4].contiguous(), targets))
                elif kind == "no batch" and odd:
                    pipe.step((None, targets))
                elif kind == "another batch" and odd:
                    pipe.step((ids.flip(0), targets))
                else:
                    pipe.step(BATCH)
            except NpuPipeError as error:
                said = f"{type(error).__name__}: {error}"
            loss = pipe.step(BATCH).loss
            places = pipe.gather(world.rank)
            group = ranks.group
        # After its end the layers are as they were before it.
        x = torch.full((1,), float(ranks.rank))
        torch.distributed.all_reduce(x, group=group)
    except NpuPipeError as error:
        return {"said": f"{type(error).__name__}: {error}"}
    return {"said": said, "loss": loss, "places": places, "sum": float(x)}


def clips(world: World, *, max_norm: float) -> dict[str, Any]:
    """The norm of all gradients, and this rank's after they were scaled to it."""
    with pipelines(world) as (pipe, stages, _):
        pipe.step(BATCH)
        norm = pipe.clip_gradients(max_norm)
        again = pipe.clip_gradients(1e9)
        gains = {
            name: parameter.grad.tolist()
            for stage in stages.values()
            for name, parameter in stage.named_parameters()
            if name.endswith("norm.weight") and isinstance(parameter.grad, Tensor)
        }
    return {"norm": norm, "again": again, "gains": gains}
