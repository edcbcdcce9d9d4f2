"""Compare a job's pipeline with the unsplit model, number by number.

The path of the third founding document, section 12: the same data and the same first parameters
through both, without dropout, in float64 (where the device has it), float32 and the job's own
precision; logits, loss, gradients and the updated parameters compared, to the limits that
`npu_pipe.train.unsplit` gives reasons for; other numbers of microbatches give the same update;
and a log of sample ids proves that each microbatch passed each stage exactly once, in the
schedule's order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from rich.table import Table
from torch import Tensor, nn

from npu_pipe.comm.links import link_for
from npu_pipe.device.choose import choose
from npu_pipe.device.device import Device
from npu_pipe.errors import ScheduleError
from npu_pipe.ir.action import Kind, flatten
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.preflight import preflight
from npu_pipe.launch.world import World
from npu_pipe.pipeline import Pipeline
from npu_pipe.runtime.loss import MeanLoss
from npu_pipe.train.adamw import build_adamw
from npu_pipe.train.computing import computing
from npu_pipe.train.data import load_corpus
from npu_pipe.train.job import Job, mesh_of, plan_of
from npu_pipe.train.output import open_console
from npu_pipe.train.precision import Precision
from npu_pipe.train.stages import Shared, Whole, open_parts
from npu_pipe.train.unsplit import (
    Arithmetic,
    Outcome,
    arithmetics,
    differences,
    gradient,
    limits,
    nan_last,
    unsplit,
)

__all__ = ["Finding", "verify"]

_ONCE = "once"
_LEGEND = (
    "largest relative difference over all ranks; 'once': each microbatch passed each\n"
    "stage exactly once, by the log of sample ids"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison. difference: the largest over all ranks, relative; limit: what is rounding."""

    check: str
    difference: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.limit  # False for NaN


def verify(job: Job, world: World) -> bool:
    """Run all comparisons and print them, on rank 0, as a table. Collective.

    Returns whether all hold, the same on every rank. Raises UsageError for a job that cannot
    run, PeerError when another rank fails.
    """
    job = replace(job, mesh=replace(job.mesh, dp=1))  # of all replicas, one
    mesh = mesh_of(job)
    mesh.check_world(world)
    jobs = list(_jobs(job))
    rows = math.lcm(*(each.pipeline.microbatches for each in jobs))
    runs: dict[str, list[Finding]] = {}
    device = choose(job.run.device, index=world.local_rank).device
    device.select()
    parts = open_parts(mesh, world, device=device)
    limits = preflight(
        plan_of(job).schedule,
        backend=device.backend,
        local_rank=world.local_rank,
        mesh=mesh,
        lanes=job.lanes,
        prefetch=job.pipeline.prefetch,
    )
    console = open_console(quiet=world.rank != 0)
    here = mesh.pipeline_world(world)
    with console.status("") as status:  # a line that moves, and only on a terminal
        for arithmetic in arithmetics(job.model.precision, widest=device.widest):
            for each in jobs:
                name = f"{arithmetic}  m = {each.pipeline.microbatches}"
                status.update(f"comparing {name}")
                runs[name] = _compare(each, here, device, parts, arithmetic=arithmetic, rows=rows)
    if world.rank == 0:
        if limits is not None:
            console.print(limits, markup=False, highlight=False, soft_wrap=True)
        for shown in (_title(job), _table(runs), _LEGEND):
            console.print(shown, highlight=False)
    return all(finding.holds for findings in runs.values() for finding in findings)


def _jobs(job: Job) -> Iterable[Job]:
    """The job, and the job with the other numbers of microbatches that its schedule takes."""
    yield job
    for microbatches in (1, 2, 4):
        if microbatches == job.pipeline.microbatches:
            continue
        pipeline = replace(job.pipeline, microbatches=microbatches)
        other = replace(job, pipeline=pipeline, data=replace(job.data, batch=microbatches))
        try:
            plan_of(other)
        except ScheduleError:
            continue
        yield other


class _Logged(nn.Module):
    """A stage that notes which samples pass it; their ids travel on with the value."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.log: list[list[int]] = []

    def forward(self, value: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.log.append(ids.tolist())
        return self.module(value), ids


def _compare(
    job: Job,
    world: World,
    device: Device,
    parts: Whole | Shared,
    *,
    arithmetic: Arithmetic,
    rows: int,
) -> list[Finding]:
    plan, place = plan_of(job), device.place
    schedule, seed = plan.schedule, job.run.seed
    data = replace(job.data, batch=rows)
    batch = load_corpus(data).training_batch(data, seed=seed, step=1)
    inputs, targets = (torch.from_numpy(p).to(place) for p in (batch.inputs, batch.targets))
    ids = torch.arange(rows, device=place)
    stages = {
        stage: _Logged(
            parts.build(job.model, plan.layers[stage], seed=seed).to(place, arithmetic.dtype)
        )
        for stage in schedule.stages_of(world.rank)
    }
    mixed_up: list[int] = []

    def loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        mixed_up.extend((output[1] != target[1]).nonzero().flatten().tolist())
        return parts.loss(output[0], target[0])

    def part(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mine = (parts.cut(stage.module, values) for stage in stages.values())
        return {name: value for each in mine for name, value in each.items()}

    def part_of_logits(logits: Tensor) -> Tensor:
        return parts.cut_logits(logits, schedule.microbatches)

    with (
        Pipeline(
            stages,
            schedule=schedule,
            loss=MeanLoss(loss),
            world=world,
            prefetch=job.pipeline.prefetch,
            timeout_s=job.pipeline.timeout_s,
            tensor_parallel=parts.ranks,
            link=link_for(stages.values(), schedule=schedule, options=job.lanes),
        ) as pipe,
        pipe.patience(600),  # each rank runs the whole model too
    ):
        theirs, before = unsplit(job, arithmetic, inputs, targets, device=device)
        allowed = _allowed(job, arithmetic, theirs, before, inputs, targets, device=device)
        with computing(arithmetic.precision, device):
            output = pipe.predict((inputs, ids))
        for stage in stages.values():
            stage.log.clear()
        with computing(arithmetic.precision, device):
            result = pipe.step(((inputs, ids), (targets, ids)))
        named = {
            name: parameter
            for stage in stages.values()
            for name, parameter in stage.module.named_parameters()
        }
        gradients = {name: gradient(parameter).clone() for name, parameter in named.items()}
        norm = pipe.clip_gradients(job.optimizer.clip_norm)
        build_adamw(job.optimizer, stages.values()).step()
        logits = None if output is None else output[0]
        ours = Outcome(logits, result.loss, gradients, norm, named)
        mine = differences(ours, theirs.cut(part, part_of_logits), part(before))
        misses = sum(_misses(schedule, stages, rank=world.rank, rows=rows)) + len(mixed_up)
        answers = pipe.gather({**mine, _ONCE: float(misses)})
    worst = {check: max((each[check] for each in answers), key=nan_last) for check in answers[0]}
    return [Finding(check, value, allowed.get(check, 0)) for check, value in worst.items()]


def _allowed(
    job: Job,
    arithmetic: Arithmetic,
    theirs: Outcome,
    before: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    device: Device,
) -> dict[str, float]:
    wide = None
    if job.mesh.tp > 1 and arithmetic.precision is not Precision.FLOAT32:
        wide, _ = unsplit(job, Arithmetic(arithmetic.dtype), inputs, targets, device=device)
    return limits(arithmetic, theirs, wide, before)


def _misses(
    schedule: Schedule, stages: Mapping[int, _Logged], *, rank: int, rows: int
) -> Iterable[int]:
    """Per stage, in how many places its log is not what the schedule says of this rank."""
    size = rows // schedule.microbatches
    for index, stage in stages.items():
        wanted = [
            list(range(action.microbatch * size, (action.microbatch + 1) * size))
            for step in schedule.orders[rank]
            for action in flatten(step)
            if action.kind is Kind.F and action.stage == index
        ]
        wrong = sum(found != want for found, want in zip(stage.log, wanted, strict=False))
        yield wrong + abs(len(stage.log) - len(wanted))


def _title(job: Job) -> str:
    return f"{job.pipeline.schedule} on {mesh_of(job).size} ranks against the unsplit model"


def _table(runs: Mapping[str, list[Finding]]) -> Table:
    table = Table()
    for name in ("", *(finding.check for finding in next(iter(runs.values())))):
        table.add_column(name, justify="right")
    for name, findings in runs.items():
        table.add_row(name, *map(_cell, findings))
    return table


def _cell(finding: Finding) -> str:
    if finding.check == _ONCE:
        return "yes" if finding.holds else f"[red]{finding.difference:g} misses[/red]"
    text = f"{finding.difference:.1e}"
    return text if finding.holds else f"[red]{text} DIFFERS[/red]"
