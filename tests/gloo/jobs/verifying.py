"""Jobs that run `verify`, on an honest pipeline and on ones with a fault built in."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch import Tensor, nn

from npu_pipe import World
from npu_pipe.runtime import window
from npu_pipe.train import stages
from npu_pipe.train import verify as module
from npu_pipe.train.data import DataConfig
from npu_pipe.train.job import Job
from npu_pipe.train.mesh import MeshConfig
from npu_pipe.train.model_config import ModelConfig
from npu_pipe.train.plan import PipelineConfig
from npu_pipe.train.precision import Precision

build_stage = stages.build_stage


def job(world: World, schedule: str, *, precision: str = "float32", tp: int = 1) -> Job:
    model = ModelConfig(dim=16, blocks=6, heads=2, hidden=24, precision=Precision(precision))
    return Job(
        model=model,
        data=DataConfig(batch=8, sequence=16),
        pipeline=PipelineConfig(
            schedule=schedule, ranks=world.size // tp, microbatches=4, timeout_s=20
        ),
        mesh=MeshConfig(tp=tp),
    )


def honest(world: World, *, schedule: str, precision: str = "float32", tp: int = 1) -> bool:
    return module.verify(job(world, schedule, precision=precision, tp=tp), world)


class Faulty(nn.Module):
    """Computes right, but for one thing."""

    def __init__(self, inner: nn.Module, fault: str) -> None:
        super().__init__()
        self.inner = inner
        self.fault = fault
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.inner(x)
        if self.fault == "one gradient is scaled" and y.requires_grad:
            y.register_hook(lambda g: g * 1.001)
        if self.fault == "one microbatch is computed wrong" and self.calls % 4 == 2:
            y = y + 1e-3
        return y

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.named_parameters(*args, **kwargs)


def faulty(world: World, *, fault: str) -> bool:
    """One stage, of rank 1, is not what it should be."""

    def build(config: ModelConfig, layers: Any, *, seed: int) -> nn.Module:
        if fault == "other parameters" and world.rank == 1:
            seed += 1
        stage = build_stage(config, layers, seed=seed)
        return Faulty(stage, fault) if world.rank == 1 else stage

    with mock.patch.object(stages, "build_stage", build):
        return module.verify(job(world, "1f1b"), world)


def samples_mixed_up(world: World) -> bool:
    """The targets meet the outputs of other samples."""
    honest_split = window.split_batch

    def rotated(value: Any, microbatches: int, what: str) -> list[Any]:
        pieces = honest_split(value, microbatches, what)
        return pieces[1:] + pieces[:1] if what == "targets" else pieces

    with mock.patch.object(window, "split_batch", rotated):
        return module.verify(job(world, "1f1b"), world)
