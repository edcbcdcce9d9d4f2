"""Jobs that train in bfloat16 and compare, in bfloat16 too, with the unsplit model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from jobs.verifying import job
from npu_pipe import MeanLoss, Pipeline, World
from npu_pipe.device.cpu import Cpu
from npu_pipe.train import verify as module
from npu_pipe.train.computing import computing
from npu_pipe.train.job import mesh_of, plan_of
from npu_pipe.train.model import build_model, token_loss
from npu_pipe.train.precision import Precision
from npu_pipe.train.stages import open_parts
from npu_pipe.train.unsplit import Arithmetic

ROUNDED = Arithmetic(torch.float32, Precision.BFLOAT16)


def update(world: World, *, schedule: str, recompute: bool = False) -> dict[str, Any]:
    """Gradients of two steps, bit for bit but for the order of sums in float32; and the dtypes of
    what crosses, of gradients, and of the output of an evaluation."""
    this = job(world, schedule, precision="bfloat16")
    model = replace(this.model, recompute=recompute)
    plan = plan_of(this)
    parts = open_parts(mesh_of(this), world, device=Cpu())
    mine = {
        s: parts.build(model, plan.layers[s], seed=0) for s in plan.schedule.stages_of(world.rank)
    }
    crossed: set[str] = set()
    for stage, each in mine.items():
        if stage < plan.schedule.stages - 1:
            each.register_forward_hook(lambda _, __, output: crossed.add(str(output.dtype)))
    whole = build_model(model, seed=0)
    ids = torch.arange(8 * 17).remainder(251).view(8, 17)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    largest = 0.0
    with Pipeline(
        mine, schedule=plan.schedule, loss=MeanLoss(parts.loss), world=world, timeout_s=20
    ) as pipe:
        for _ in range(2):
            with computing(Precision.BFLOAT16, Cpu()):
                result = pipe.step((inputs, targets))
            with computing(Precision.BFLOAT16, Cpu()):
                output = pipe.predict(inputs)
                evaluated = pipe.evaluate((inputs, targets)).loss
            expected = _unsplit(whole, inputs, targets, pieces=plan.schedule.microbatches)
            theirs = dict(whole.named_parameters())
            assert abs(result.loss - expected) <= 1e-6 * expected
            assert abs(evaluated - expected) <= 1e-6 * expected
            for name, parameter in (p for m in mine.values() for p in m.named_parameters()):
                assert parameter.grad is not None
                assert parameter.dtype == parameter.grad.dtype == torch.float32, name
                reference = theirs[name].grad
                assert reference is not None
                difference = (parameter.grad - reference).abs().max() / reference.abs().max()
                largest = max(largest, float(difference))
            for each in (whole, *mine.values()):
                each.zero_grad()
    return {
        "difference": largest,
        "crossed": sorted(crossed),
        "output": None if output is None else str(output.dtype),
    }


def _unsplit(whole: nn.Module, inputs: Tensor, targets: Tensor, *, pieces: int) -> float:
    total = 0.0
    cut = zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [token_loss(whole(each), target) / pieces for each, target in cut]
    for loss in losses:
        assert loss.dtype == torch.float32
        loss.backward()
        total += loss.item()
    return total


def scaled(world: World, *, tp: int, factor: float) -> bool:
    """What `verify` says in bfloat16 alone, where the gradients of one stage are too large."""
    owner = module.Whole if tp == 1 else module.Shared
    build = owner.build

    def scale(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * factor)

    def faulty(self: Any, *args: Any, **kwargs: Any) -> nn.Module:
        made = build(self, *args, **kwargs)
        if world.rank // tp == 1:
            made.register_forward_hook(scale)
        return made

    def alone(*args: Any, **kwargs: Any) -> list[Arithmetic]:
        return [ROUNDED]

    with (
        mock.patch.object(owner, "build", faulty),
        mock.patch.object(module, "arithmetics", alone),
    ):
        return module.verify(job(world, "1f1b", precision="bfloat16", tp=tp), world)
