"""Subject: the training that would be started. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from npu_pipe.doctor.diagnosis import Diagnosis
from npu_pipe.errors import ConfigError
from npu_pipe.finding import Finding
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.mesh import Mesh
from npu_pipe.launch.world import Launcher, World
from npu_pipe.schedules.registry import build_schedule
from npu_pipe.train.bounds import between
from npu_pipe.train.job import Job, mesh_of, plan_of
from npu_pipe.train.toml import read_toml

__all__ = ["Subject", "diagnosis_of", "read_subject"]

_ALONE = 2  # ranks to try, where nothing says how many
_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class Subject:
    """schedule: of each pipeline of the mesh. wanted: kind of device."""

    mesh: Mesh
    schedule: Schedule
    wanted: str


def read_subject(
    config: Path | None, *, ranks: int | None, device: str | None, started: bool
) -> Subject:
    """Of a job file; without one, a pipeline of `ranks`.

    started: a launcher has started them. Raises UsageError for a file or numbers that do not work.
    """
    if ranks is not None:
        between(1, _MOST, ranks=ranks)
    if config is None:
        ranks = ranks or _ALONE
        schedule = build_schedule("1f1b", ranks=ranks, microbatches=ranks)
        return Subject(Mesh(pp=ranks), schedule, device or "auto")
    job = read_toml(Job, config)
    schedule, mesh = plan_of(job).schedule, mesh_of(job)
    if ranks not in (None, mesh.size):
        raise ConfigError(
            "a job runs on dp x pp x tp processes",
            f"{config} has {mesh}, and {ranks} were {'started' if started else 'asked for'}",
            f"start {mesh.size}, or give another job file",
        )
    return Subject(mesh, schedule, device or job.run.device)


def diagnosis_of(subject: Subject, world: World, findings: Sequence[Finding] = ()) -> Diagnosis:
    """Where a diagnosis begins: who started what, and how the ranks lie."""
    schedule = subject.schedule
    mesh = Finding("mesh", f"{subject.mesh}; {schedule.name} on each pipeline")
    return Diagnosis(
        world=world,
        mesh=subject.mesh,
        schedule=schedule.name,
        stages=tuple(tuple(schedule.stages_of(rank)) for rank in range(schedule.ranks)),
        versions={},
        variables={},
        findings=(_launcher(world, subject.mesh), mesh, *findings),
    )


def _launcher(world: World, mesh: Mesh) -> Finding:
    if world.launcher is Launcher.ONE_PROCESS:
        facts = f"none: npu-pipe starts {mesh.size} rank{'s' * (mesh.size > 1)} on this host"
        return Finding("launcher", facts)
    told = []
    for name in ("rank", "size", "local_rank", "address", "port"):
        source = f" ({getattr(world.sources, name)})" if world.sources else ""
        told.append(f"{name.replace('_', ' ')} {getattr(world, name)}{source}")
    return Finding("launcher", f"{world.launcher.value}: {', '.join(told)}")
