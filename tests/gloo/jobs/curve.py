"""The losses of a small model, trained as the trainer does it, and of the unsplit one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from npu_pipe.launch.world import World
from npu_pipe.train.adamw import build_adamw, set_learning_rate
from npu_pipe.train.data import DataConfig, load_corpus
from npu_pipe.train.job import Job
from npu_pipe.train.mesh import MeshConfig
from npu_pipe.train.metrics import read_metrics
from npu_pipe.train.model import build_model, token_loss
from npu_pipe.train.model_config import ModelConfig
from npu_pipe.train.optimizer import learning_rate
from npu_pipe.train.plan import PipelineConfig
from npu_pipe.train.precision import Precision
from npu_pipe.train.run_folder import RunConfig
from npu_pipe.train.trainer import train

JOB = Job(
    model=ModelConfig(dim=32, blocks=6, heads=2, hidden=64),
    data=DataConfig(batch=8, sequence=32),
    pipeline=PipelineConfig(microbatches=4),
    run=RunConfig(steps=20),
)


def pipeline(
    world: World,
    *,
    schedule: str,
    folder: str,
    resume: bool = False,
    dp: int = 1,
    tp: int = 1,
    recompute: bool = False,
    precision: str = "float32",
    held_out: float = JOB.data.validation_fraction,
    **run: int,
) -> list[list[float]]:
    """(loss, norm of the gradient) of each update. run: settings other than JOB's."""
    microbatches = JOB.pipeline.microbatches // (2 if dp > 2 else 1)
    job = replace(
        JOB,
        pipeline=replace(
            JOB.pipeline,
            schedule=schedule,
            ranks=world.size // (dp * tp),
            microbatches=microbatches,
        ),
        model=replace(JOB.model, recompute=recompute, precision=Precision(precision)),
        data=replace(JOB.data, validation_fraction=held_out),
        mesh=MeshConfig(dp=dp, tp=tp),
        run=replace(JOB.run, folder=Path(folder), **run),
    )
    train(job, world, resume=resume)
    if world.rank > 0:
        return []
    lines = read_metrics(Path(folder) / "metrics.jsonl")
    return [[line["loss"], line["grad_norm"]] for line in lines if line["kind"] == "update"]


def unsplit(
    steps: int = JOB.run.steps,
    *,
    held_out: float = JOB.data.validation_fraction,
    precision: str = "float32",
) -> list[list[float]]:
    data = replace(JOB.data, validation_fraction=held_out)
    model = replace(JOB.model, precision=Precision(precision))
    return unsplit_of(replace(JOB, data=data, model=model), steps=steps)


def unsplit_of(job: Job, *, steps: int) -> list[list[float]]:
    """(loss, norm of the gradient) of each update of the unsplit model, on one CPU. In bfloat16 in
    microbatches, so that products have as many rows as in a pipeline."""
    corpus = load_corpus(job.data)
    model = build_model(job.model, seed=job.run.seed)
    optimizer = build_adamw(job.optimizer, [model])
    rounds = job.model.precision is Precision.BFLOAT16
    pieces = job.pipeline.microbatches if rounds else 1
    curve = []
    for step in range(1, steps + 1):
        batch = corpus.training_batch(job.data, seed=job.run.seed, step=step)
        cut = [torch.from_numpy(each).chunk(pieces) for each in (batch.inputs, batch.targets)]
        with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
            losses = [token_loss(model(x), target) / pieces for x, target in zip(*cut, strict=True)]
        loss = torch.stack(losses).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.clip_norm)
        set_learning_rate(optimizer, learning_rate(job.optimizer, step, steps=steps))
        optimizer.step()
        optimizer.zero_grad()
        curve.append([loss.item(), norm.item()])
    return curve


def disagreeing(world: World, *, folder: str) -> None:
    """Each rank has a learning rate of its own."""
    _with_learning_rate(world, folder, 1e-3 * (1 + world.rank))


def diverging(world: World, *, folder: str) -> None:
    """A learning rate that no model survives."""
    _with_learning_rate(world, folder, 1e30)


def _with_learning_rate(world: World, folder: str, value: float) -> None:
    job = replace(
        JOB,
        pipeline=replace(JOB.pipeline, ranks=world.size),
        optimizer=replace(JOB.optimizer, learning_rate=value),
        run=replace(JOB.run, folder=Path(folder)),
    )
    train(job, world)
