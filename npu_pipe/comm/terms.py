"""Terms: what the ranks of a pipeline are given alike, compared before the first transfer."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from npu_pipe.comm.handshake import require_equal
from npu_pipe.comm.team import Team
from npu_pipe.comm.wrapped import wrappers_in
from npu_pipe.errors import ConfigError
from npu_pipe.ir.files import schedule_hash
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.loss import Loss
from npu_pipe.simulator.costs import Costs

__all__ = ["agree_on_terms", "check_terms"]


def check_terms(schedule: Schedule, *, processes: int, **seconds: float) -> None:
    """Raise ConfigError for what this rank can know to be wrong by itself."""
    if schedule.ranks != processes:
        raise ConfigError(
            "a schedule has one rank for each process",
            f"the schedule has {schedule.ranks} ranks, the world {processes}",
            f"start {schedule.ranks} processes, or build the schedule for {processes} ranks",
        )
    for name, value in seconds.items():
        if not 0 < value <= 1e6:  # False for NaN
            raise ConfigError(
                f"{name} is more than 0 and at most 1000000",
                f"it is {value}",
                "give the seconds that a rank may be late",
            )


def agree_on_terms(
    team: Team,
    stages: Mapping[int, nn.Module],
    *,
    schedule: Schedule,
    costs: Costs | None,
    prefetch: int,
    loss: Loss | None,
    look: Callable[[Collection[nn.Module]], int],
) -> None:
    """Meet the other ranks about them.

    look: raises ConfigError for modules that the pipeline cannot run, and gives a number for what
    ranks that share layers have alike. Raises, on every rank, what one of them has found,
    ConfigError for stages that it does not hold, and HandshakeError where ranks differ.
    """

    def prepare() -> dict[str, Any]:
        wanted = schedule.stages_of(team.rank)
        if sorted(stages) != list(wanted):
            raise ConfigError(
                "each rank is given the modules of the stages that the schedule places on it",
                f"it was given stages {sorted(stages)}, and holds {list(wanted)}",
                "build the modules of schedule.stages_of(rank)",
            )
        wrappers_in(stages.values())  # or it is refused
        return {
            "alike": look(stages.values()),
            "number of microbatches": schedule.microbatches,
            "placement": list(schedule.placement),
            "schedule": f"{schedule.name} {schedule_hash(schedule)[:12]}",
            "costs": repr(costs),
            "prefetch": prefetch,
            "loss": type(loss).__name__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    answers = team.meet_all("Pipeline", prepare)
    alike = [answer.pop("alike") for answer in answers]
    require_equal(answers, cure="start all ranks with the same code, job and environment")
    for ranks in team.shared:
        if len({alike[rank] for rank in ranks}) > 1:
            raise ConfigError(
                "ranks that share layers begin with the same values of what is not cut",
                f"parameters of ranks {', '.join(map(str, ranks))} differ",
                "draw them from the same seed on these ranks, or load them from one checkpoint",
            )
