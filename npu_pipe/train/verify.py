"""Compare a job's pipeline with the unsplit model, number by number.

The path of the third founding document, section 12: the same data and the same first parameters
through both, without dropout, in float64 (where the device has it) and float32; logits, loss,
gradients and the updated parameters compared; other numbers of microbatches give the same update;
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
from npu_pipe.train.data import load_corpus
from npu_pipe.train.job import Job, mesh_of, plan_of
from npu_pipe.train.model import build_model, token_loss
from npu_pipe.train.output import open_console
from npu_pipe.train.stages import Shared, Whole, open_parts

__all__ = ["Finding", "verify"]

# How far the pipeline may be from the unsplit model, relative to the latter: rounding, which
# grows with the number of sums that are taken in another order, and nothing more.
_LIMITS = {torch.float64: 1e-10, torch.float32: 1e-3}
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
    with console.status("") as status:  # a line that moves, and only on a terminal
        for dtype in _dtypes(device):
            for each in jobs:
                name = f"{str(dtype).removeprefix('torch.')}  m = {each.pipeline.microbatches}"
                status.update(f"comparing {name}")
                runs[name] = _compare(
                    each, mesh.pipeline_world(world), device, parts, dtype=dtype, rows=rows
                )
    if world.rank == 0:
        if limits is not None:
            console.print(limits, markup=False, highlight=False, soft_wrap=True)
        for shown in (_title(job), _table(runs), _LEGEND):
            console.print(shown, highlight=False)
    return all(finding.holds for findings in runs.values() for finding in findings)


def _dtypes(device: Device) -> list[torch.dtype]:
    """Those that all operators of the device take."""
    return [dtype for dtype in _LIMITS if dtype.itemsize <= device.widest.itemsize]


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
    dtype: torch.dtype,
    rows: int,
) -> list[Finding]:
    plan, place = plan_of(job), device.place
    schedule, seed = plan.schedule, job.run.seed
    data = replace(job.data, batch=rows)
    batch = load_corpus(data).training_batch(data, seed=seed, step=1)
    inputs, targets = (torch.from_numpy(p).to(place) for p in (batch.inputs, batch.targets))
    ids = torch.arange(rows, device=place)
    whole = build_model(job.model, seed=seed).to(place, dtype)
    stages = {
        stage: _Logged(parts.build(job.model, plan.layers[stage], seed=seed).to(place, dtype))
        for stage in schedule.stages_of(world.rank)
    }
    mixed_up: list[int] = []

    def loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        mixed_up.extend((output[1] != target[1]).nonzero().flatten().tolist())
        return parts.loss(output[0], target[0])

    limit = _LIMITS[dtype]
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
        output = pipe.predict((inputs, ids))
        logits = whole(inputs)
        for stage in stages.values():
            stage.log.clear()
        result = pipe.step(((inputs, ids), (targets, ids)))
        expected = token_loss(logits, targets)
        expected.backward()  # type: ignore[no-untyped-call]
        ours = {
            f"{name}": parameter
            for stage in stages.values()
            for name, parameter in stage.module.named_parameters()
        }

        def part(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            mine = (parts.cut(stage.module, values) for stage in stages.values())
            return {name: value for each in mine for name, value in each.items()}

        theirs = dict(whole.named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in theirs.items()}
        gradients = _worst(_gradients(ours), part(_gradients(theirs)))
        norm = pipe.clip_gradients(job.optimizer.clip_norm)
        whole_norm = float(nn.utils.clip_grad_norm_(whole.parameters(), job.optimizer.clip_norm))
        build_adamw(job.optimizer, stages.values()).step()
        build_adamw(job.optimizer, [whole]).step()
        mine = {
            "logits": (
                0.0
                if output is None
                else _relative(output[0], parts.cut_logits(logits.detach(), schedule.microbatches))
            ),
            "loss": _ratio(abs(result.loss - expected.item()), abs(expected.item())),
            "gradients": gradients,
            "norm": _ratio(abs(norm - whole_norm), whole_norm),
            "parameters": _update_difference(ours, part(theirs), part(before)),
            _ONCE: float(
                sum(_misses(schedule, stages, rank=world.rank, rows=rows)) + len(mixed_up)
            ),
        }
        answers = pipe.gather(mine)
    worst = {check: max((answer[check] for answer in answers), key=_nan_last) for check in mine}
    return [Finding(check, value, 0 if check == _ONCE else limit) for check, value in worst.items()]


def _gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.full_like(parameter, math.nan) if parameter.grad is None else parameter.grad
        for name, parameter in parameters.items()
    }


def _worst(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    return max((_relative(ours[name], theirs[name]) for name in ours), key=_nan_last, default=0.0)


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return _ratio(float((ours - theirs).abs().max()), float(theirs.abs().max()))


def _update_difference(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> float:
    """Root mean square of the difference, relative to that of the update.

    Not the largest: AdamW's first update is close to the sign of the gradient, so where a
    gradient is all rounding, so is the update.
    """
    difference = torch.cat([(ours[name] - theirs[name]).detach().flatten() for name in ours])
    update = torch.cat([(theirs[name] - before[name]).detach().flatten() for name in ours])
    return _ratio(float(difference.norm()), float(update.norm()))


def _ratio(difference: float, of: float) -> float:
    """No difference is none, also of nothing: a gradient or learning rate may be zero."""
    if difference == 0:
        return 0.0
    return difference / of if of else math.inf


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


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


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
