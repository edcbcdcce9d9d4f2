"""Jobs that train a Llama model cut over tensor-parallel ranks and pipeline stages, and compare
with the unsplit model of `npu_pipe.train.model` on one CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jobs.fused import DTYPES, close, tensor_ranks
from npu_pipe import MeanLoss, Pipeline, RunError, World, build_schedule, partition
from npu_pipe.launch.mesh import Mesh
from npu_pipe.ops.operators import Operators
from npu_pipe.ops.ranks import Ranks
from npu_pipe.train.model import build_model
from npu_pipe.train.model_config import ModelConfig
from npu_pipe_kernels import sharding
from npu_pipe_kernels.llama import LlamaConfig, build_layers, cut_whole, load_whole
from npu_pipe_kernels.needs import llama_needs
from npu_pipe_kernels.providers import providers
from npu_pipe_kernels.sharding import Keep, Sharding
from npu_pipe_kernels.vocabulary import token_losses

SMALL = {"dim": 16, "blocks": 3, "heads": 4, "hidden": 24, "vocabulary": 256}


def config_of(model: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        dim=model.dim,
        blocks=model.blocks,
        heads=model.heads,
        kv_heads=model.heads,
        hidden=model.hidden,
        vocabulary=model.vocabulary,
    )


def mean_loss(logits_tbv: Tensor, targets_bt: Tensor, *, ranks: Ranks) -> Tensor:
    return token_losses(logits_tbv, targets_bt, ranks).mean()


def batch_of(model: ModelConfig, rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(model.vocabulary, (rows, length + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def unsplit(
    model: ModelConfig, dtype: torch.dtype, batch: tuple[Tensor, Tensor]
) -> tuple[nn.Module, float]:
    """The whole model with its gradients, and the loss: in this dtype's numbers, but computed in
    float64."""
    whole = build_model(model, seed=3).to(dtype).double()
    ids, targets = batch
    logits = whole(ids)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return whole, loss.item()


def trains(
    world: World,
    *,
    name: str = "zb-v",
    tp: int = 2,
    microbatches: int = 4,
    kind: str = "cpu",
    dtype: str = "float32",
    provider: str | None = None,
    sequence: str = "SHARDED",
    keep: str = "GATHERED",
    sizes: dict[str, int] = SMALL,
    length: int = 6,
    limit: float = 5e-6,
    checkpointed: bool = False,
) -> dict[str, Any]:
    """Two steps of a schedule on pp x tp ranks: loss and gradients are the unsplit model's.

    checkpointed: every stage under activation checkpointing.
    """
    mesh = Mesh(pp=world.size // tp, tp=tp)
    model = ModelConfig(**sizes)
    batch = batch_of(model, 2 * microbatches, length)
    whole, total = unsplit(model, DTYPES[dtype], batch)
    values = {each: p.detach() for each, p in whole.named_parameters()}
    gradients = {each: p.grad for each, p in whole.named_parameters()}
    with tensor_ranks(world, mesh, kind) as ranks:
        operators = Operators(ranks, providers(), wanted=provider)
        cut = Sharding(operators, sharding.Sequence[sequence], Keep[keep])
        planned = llama_needs(config_of(model), cut, rows=2, length=length, dtype=DTYPES[dtype])
        operators.plan(planned)
        schedule = build_schedule(name, ranks=mesh.pp, microbatches=microbatches)
        pipeline = mesh.pipeline_world(world)
        parts = partition([1] * model.layers, stages=schedule.stages)
        mine = {
            stage: build_layers(config_of(model), parts[stage], cut)
            .to(DTYPES[dtype])
            .to(ranks.place)
            for stage in schedule.stages_of(pipeline.rank)
        }
        for module in mine.values():
            load_whole(module, values)
        stages: dict[int, nn.Module] = {
            stage: Checkpointed(module) if checkpointed else module
            for stage, module in mine.items()
        }
        with Pipeline(
            stages,
            schedule=schedule,
            loss=MeanLoss(partial(mean_loss, ranks=ranks)),
            world=pipeline,
            timeout_s=60,
            tensor_parallel=ranks,
        ) as pipe:
            for _ in range(2):
                for module in mine.values():
                    module.zero_grad()
                result = pipe.step(tuple(each.to(ranks.place) for each in batch))
            norm = pipe.clip_gradients(1e9)
            assert math.isclose(result.loss, total, rel_tol=limit), (result.loss, total)
        wanted_norm = nn.utils.clip_grad_norm_(whole.parameters(), 1e9).item()
        assert math.isclose(norm, wanted_norm, rel_tol=limit), (norm, wanted_norm)
        worst = 0.0
        for module in mine.values():
            wanted = cut_whole(module, gradients)
            for each, parameter in module.named_parameters():
                assert parameter.grad is not None, each
                worst = max(worst, close(parameter.grad, wanted[each], limit))
        assert len(operators.rows()) == len(planned), "nothing has run that was not planned"
        return {"worst": worst, "rows": operators.rows()}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def halves(world: World, *, keep: str) -> dict[str, Any]:
    """A block as a stage, its backward in halves: what waits for W, and what it takes."""
    with tensor_ranks(world, Mesh(tp=world.size), "cpu") as ranks:
        from npu_pipe.runtime.boundary import flatten_value
        from npu_pipe.runtime.stage import Stage

        model = ModelConfig(**SMALL)
        cut = Sharding(Operators(ranks, providers()), keep=Keep[keep])
        block = build_layers(config_of(model), [1], cut)
        whole = build_model(model, seed=3)
        load_whole(block, dict(whole.named_parameters()))
        stage = Stage(0, block)
        x = torch.randn(4, 3, model.dim, generator=torch.Generator().manual_seed(ranks.rank))
        meta, _ = flatten_value(x.clone().requires_grad_(), "the input")
        y = stage.forward(0, meta, [x])
        stage.keep(0, [y])
        stage.input_backward(0, [torch.ones_like(y)])
        before = [name for name, p in block.named_parameters() if p.grad is not None]
        bytes_held = held_bytes(stage._deferred[0])
        put_off = len(stage._deferred[0])
        stage.weight_backward(0)
        after = [name for name, p in block.named_parameters() if p.grad is not None]
        return {"before": before, "put_off": put_off, "after": len(after), "bytes": bytes_held}


def held_bytes(deferred: Sequence[Any]) -> int:
    """Of the storages that W reads, each once."""
    found = {}
    for each in deferred:
        for tensor in (each.output_gradient, *(read for read, _ in each.gradients.read)):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class Fails(nn.Module):
    """Raises in its n-th forward."""

    def __init__(self, inner: nn.Module, call: int) -> None:
        super().__init__()
        self.inner = inner
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        self.call -= 1
        if self.call == 0:
            raise ValueError("the stage is broken")
        out: Tensor = self.inner(x)
        return out


def one_fails(world: World, *, rank: int, kind: str = "cpu") -> dict[str, Any]:
    """A rank raises in the middle of a step, in one of two pipelines side by side. What this one
    raised, after how long, and what it said to a reset."""
    mesh = Mesh(pp=world.size // 2, tp=2)
    model = ModelConfig(**SMALL)
    schedule = build_schedule("zb-v", ranks=mesh.pp, microbatches=4)
    pipeline = mesh.pipeline_world(world)
    whole = dict(build_model(model, seed=3).named_parameters())
    parts = partition([1] * model.layers, stages=schedule.stages)
    batch = batch_of(model, 8, 6)
    with tensor_ranks(world, mesh, kind) as ranks:
        cut = Sharding(Operators(ranks, providers()))
        mine: dict[int, nn.Module] = {}
        for stage in schedule.stages_of(pipeline.rank):
            layers = build_layers(config_of(model), parts[stage], cut).to(ranks.place)
            load_whole(layers, whole)
            mine[stage] = Fails(layers, 3 if world.rank == rank else -1)
        found = {"kind": "none", "text": "", "seconds": 0.0, "reset": ""}
        with Pipeline(
            mine,
            schedule=schedule,
            loss=MeanLoss(partial(mean_loss, ranks=ranks)),
            world=pipeline,
            timeout_s=8,
            tensor_parallel=ranks,
        ) as pipe:
            start_s = time.perf_counter()
            try:
                pipe.step(tuple(each.to(ranks.place) for each in batch))
            except Exception as error:
                seconds = time.perf_counter() - start_s
                found |= {"kind": type(error).__name__, "text": str(error), "seconds": seconds}
            try:
                pipe.reset()
            except RunError as error:
                found["reset"] = str(error)
        return found
