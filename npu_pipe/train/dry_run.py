"""Everything of a run that can be known before it: no process, no device, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from npu_pipe.api import simulate
from npu_pipe.comm.device_pairs import pairs_used
from npu_pipe.comm.preflight import Need, check_needs, needs
from npu_pipe.errors import ConfigError, UsageError
from npu_pipe.ir.program import Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.mesh import Mesh, check_nodes
from npu_pipe.launch.preflight import hccl_settings, other_groups
from npu_pipe.lowering.lower import lower
from npu_pipe.planner.comparison import compare
from npu_pipe.planner.limits import Limits
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.memory import Memory, peak_memory
from npu_pipe.train.estimate import layer_bytes, tokens_of, workload_of
from npu_pipe.train.job import Job, mesh_of, plan_of
from npu_pipe.train.plan import Plan

__all__ = ["DryRun", "RankMemory", "check_fits", "dry_run", "room_of"]

_GIB = 1 << 30
_MB = 10**6


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one place of the pipeline holds, in bytes.

    state: parameters, gradients, optimizer, copies that autocast keeps. activations: at most, with
    the buffers of transfers.
    working: what a layer takes while it runs. communicators: their buffers.
    """

    rank: int
    layers: tuple[range, ...]
    state: float
    activations: float
    working: float
    communicators: float
    reserve: float

    @property
    def total(self) -> float:
        return self.state + self.activations + self.working + self.communicators + self.reserve


@dataclass(frozen=True, slots=True)
class DryRun:
    """program: what each rank of a pipeline will run; proved. update_us, bubble_ratio: predicted
    for a pipeline, without the optimizer and the sum over replicas. words: worth knowing."""

    job: Job
    mesh: Mesh
    plan: Plan
    program: Program
    update_us: float
    bubble_ratio: float
    memory: tuple[RankMemory, ...]
    needs: tuple[Need, ...]
    words: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        tokens = self.job.data.batch * self.job.data.sequence
        return tokens / (self.update_us / 1e6)

    @property
    def limit(self) -> float:
        """Bytes of a device."""
        return self.job.cluster.memory_gib * _GIB


def dry_run(job: Job) -> DryRun:
    """Plan the job, and predict its memory and time. Raises UsageError for what does not fit its
    own sizes or the limits of communicators; whether it fits a device, see `check_fits`."""
    mesh, plan = mesh_of(job), plan_of(job)
    words = tuple(check_nodes(mesh, per_node=min(job.cluster.ranks_per_node, mesh.size)))
    costs = _costs(job, plan)
    program = lower(plan.schedule, costs, prefetch=job.pipeline.prefetch)
    timeline = simulate(program, costs)
    taken = _needs(job, plan.schedule)
    return DryRun(
        job=job,
        mesh=mesh,
        plan=plan,
        program=program,
        update_us=timeline.makespan,
        bubble_ratio=timeline.bubble_ratio,
        memory=_memory(job, plan, program, taken),
        needs=taken,
        words=words,
    )


def check_fits(run: DryRun) -> None:
    """Raise ConfigError, with what would fit, if a rank holds more than its device has."""
    fullest = max(run.memory, key=lambda each: each.total)
    if fullest.total <= run.limit:
        return
    job = run.job
    facts = (
        f"rank {fullest.rank} of the pipeline would hold {_gib(fullest.total)} of "
        f"{_gib(run.limit)} ({job.cluster.name}): {_gib(fullest.state)} parameters, gradients and "
        f"optimizer, {_gib(fullest.activations)} activations, {_gib(fullest.working)} while a "
        f"layer runs, {_gib(fullest.communicators)} communicators, {_gib(fullest.reserve)} reserve"
    )
    cures = _what_fits(run)
    cure = ", or ".join(cures) if cures else "use more pipeline.ranks, or a smaller model"
    raise ConfigError("what a rank holds fits into its device", facts, cure)


def room_of(job: Job) -> float:
    """Bytes that a rank has for its layers and their activations. Raises UsageError."""
    sizes = layer_bytes(job.model, tokens=tokens_of(job), tp=job.mesh.tp)
    buffers = max(need.buffers_mb for need in _needs(job, plan_of(job).schedule)) * _MB
    working = max(size.working for size in sizes)
    return (job.cluster.memory_gib - job.cluster.reserve_gib) * _GIB - working - buffers


def _what_fits(run: DryRun) -> list[str]:
    """Changes of one setting with which it would fit."""
    job, found = run.job, []
    if not job.model.recompute and _fits(replace(job, model=replace(job.model, recompute=True))):
        found.append("set model.recompute = true")
    chosen = compare(
        workload_of(job),
        Limits(memory_bytes=room_of(job)),
        ranks=job.pipeline.ranks,
        microbatches=job.pipeline.microbatches,
    ).advice.chosen
    if chosen is not None:
        pipeline = replace(job.pipeline, schedule=chosen.schedule.name, chunks=None)
        if _fits(replace(job, pipeline=pipeline)):
            found.append(f"take pipeline.schedule = '{chosen.schedule.name}'")
    share = job.data.batch // (job.pipeline.microbatches * job.mesh.dp)
    if share % 2 == 0:
        smaller = replace(job.pipeline, microbatches=2 * job.pipeline.microbatches)
        if _fits(replace(job, pipeline=smaller)):
            found.append(f"cut the batch into pipeline.microbatches = {smaller.microbatches}")
    return found


def _fits(job: Job) -> bool:
    try:
        run = dry_run(job)
    except UsageError:
        return False
    return max(each.total for each in run.memory) <= run.limit


def _costs(job: Job, plan: Plan) -> Costs:
    """Of the stages as the trainer cuts them."""
    work = workload_of(job)

    def summed(values: Sequence[float]) -> tuple[float, ...]:
        if not values:
            return ()
        return tuple(math.fsum(values[i] for i in part) for part in plan.layers)

    return Costs(
        forward=summed(work.forward),
        input_grad=summed(work.input_grad),
        weight_grad=summed(work.weight_grad),
        transfer=tuple(work.transfer[part[-1]] for part in plan.layers[:-1]),
        recompute=summed(work.recompute),
        overlapped=work.overlapped,
    )


def _memory(
    job: Job, plan: Plan, program: Program, taken: Sequence[Need]
) -> tuple[RankMemory, ...]:
    work = workload_of(job)
    sizes = layer_bytes(job.model, tokens=tokens_of(job), tp=job.mesh.tp)

    def summed(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(math.fsum(values[i] for i in part) for part in plan.layers)

    memory = Memory(
        activation=summed(work.activation_bytes),
        weight_inputs=summed(work.weight_input_bytes),
        parameters=summed(work.parameter_bytes),
        boundary=tuple(work.boundary_bytes[part[-1]] for part in plan.layers[:-1]),
    )
    rows = []
    for peak, need in zip(peak_memory(program, memory), taken, strict=True):
        layers = tuple(plan.layers[stage] for stage in plan.schedule.stages_of(peak.rank))
        rows.append(
            RankMemory(
                rank=peak.rank,
                layers=layers,
                state=peak.parameter_bytes,
                activations=peak.total_bytes - peak.parameter_bytes,
                working=max(sizes[layer].working for part in layers for layer in part),
                communicators=float(need.buffers_mb * _MB),
                reserve=job.cluster.reserve_gib * _GIB,
            )
        )
    return tuple(rows)


def _needs(job: Job, schedule: Schedule) -> tuple[Need, ...]:
    """What the communicators will take on an accelerator, the most that they take anywhere."""
    settings, mesh = hccl_settings(job.lanes), mesh_of(job)
    groups = len(other_groups(mesh))
    found = needs(pairs_used(schedule), settings, ranks=schedule.ranks, groups=groups)
    last = min(job.cluster.ranks_per_node, mesh.size) - 1
    # Ports are looked at where the ranks will be.
    check_needs(found, settings, local_rank=last, is_free=lambda _: True)
    return found


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
