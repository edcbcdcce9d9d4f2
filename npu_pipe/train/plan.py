"""Which schedule runs, and which layers each of its stages holds. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from npu_pipe.errors import ConfigError, ScheduleError
from npu_pipe.ir.check import check_schedule
from npu_pipe.ir.files import is_file_name, load_schedule
from npu_pipe.ir.schedule import Schedule
from npu_pipe.partition.partition import partition
from npu_pipe.schedules.registry import build_schedule
from npu_pipe.train.bounds import at_least, between

__all__ = ["PipelineConfig", "Plan", "make_plan"]


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """How the model is spread over ranks."""

    schedule: str = "1f1b"
    """As `npu-pipe show` takes it: gpipe, 1f1b, interleaved-1f1b, zb-v, dualpipe and others, or a
    file, as `npu-pipe plan --save` writes one."""
    ranks: Annotated[int, tyro.conf.arg(aliases=("--nproc", "--mesh.pp"))] = 4
    """Positions along the pipeline: processes, with mesh.dp x mesh.tp for each."""
    microbatches: int = 8
    """Equal parts that a batch goes through the pipeline in."""
    windows: int = 1
    """Batches run one after another before one update, which is that of the joined batch."""
    chunks: int | None = None
    """Stages a rank; the schedule's own number if left out."""
    prefetch: int = 2
    """Inputs that a rank may receive ahead of their use, a lane."""
    timeout_s: float = 8.0
    """How long a rank may be without progress, while another waits, before the job ends."""


@dataclass(frozen=True, slots=True)
class Plan:
    """schedule: what runs; layers: per stage, its layers."""

    schedule: Schedule
    layers: tuple[range, ...]


def make_plan(
    config: PipelineConfig, layer_costs: tuple[float, ...], *, batch: int, replicas: int = 1
) -> Plan:
    """Build the schedule and cut the layers.

    batch: sequences an update, which the microbatches of all replicas share equally.
    Raises ScheduleError, PartitionError or ConfigError for sizes that do not fit.
    """
    between(1e-3, 1e6, pipeline__timeout_s=config.timeout_s)
    at_least(1, pipeline__prefetch=config.prefetch, pipeline__windows=config.windows)
    # These before the schedule is built, which takes long for sizes beyond all measure.
    between(1, 2**16, pipeline__microbatches=config.microbatches)
    if max(config.ranks, config.chunks or 1) > len(layer_costs):
        partition(layer_costs, stages=max(config.ranks, config.chunks or 1))
    schedule = _schedule_of(config)
    parts = config.microbatches * replicas
    if batch % parts:
        below = batch - batch % parts
        sizes = [str(size) for size in (below, below + parts) if size]
        several = f" of mesh.dp {replicas} replicas" if replicas > 1 else ""
        raise ConfigError(
            "microbatches share the batch equally",
            f"data.batch {batch} does not divide by pipeline.microbatches {config.microbatches}"
            f"{several}",
            f"use data.batch = {' or '.join(sizes)}, or other microbatches",
        )
    return Plan(schedule, partition(layer_costs, stages=schedule.stages))


def _schedule_of(config: PipelineConfig) -> Schedule:
    """Proved; of a file, for the ranks and microbatches that it has."""
    if not is_file_name(config.schedule):
        schedule = build_schedule(
            config.schedule,
            ranks=config.ranks,
            microbatches=config.microbatches,
            chunks=config.chunks,
        )
        check_schedule(schedule)
        return schedule
    schedule = load_schedule(config.schedule)
    its = schedule.ranks, schedule.microbatches, None
    if its != (config.ranks, config.microbatches, config.chunks):
        chunks = "" if config.chunks is None else f", pipeline.chunks {config.chunks}"
        raise ScheduleError(
            "a schedule of a file has sizes of its own, and the job has the same",
            f"{config.schedule} has {schedule.ranks} ranks and {schedule.microbatches} "
            f"microbatches; pipeline.ranks is {config.ranks}, pipeline.microbatches "
            f"{config.microbatches}{chunks}",
            f"give --pipeline.ranks {schedule.ranks} --pipeline.microbatches "
            f"{schedule.microbatches}, and no chunks",
        )
    return schedule
