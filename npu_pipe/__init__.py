"""npu_pipe designs, proves, predicts and runs pipeline-parallel training.

    schedule = npu_pipe.build_schedule("1f1b", ranks=4, microbatches=8)
    npu_pipe.check(schedule)
    timeline = npu_pipe.simulate(schedule, npu_pipe.Costs.uniform(4))

Importing npu_pipe imports no torch; the names that need it load it when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from npu_pipe.api import check, simulate
from npu_pipe.errors import (
    CheckpointError,
    ConfigError,
    CostsError,
    DataError,
    DeadlockError,
    HandshakeError,
    NpuPipeError,
    PartitionError,
    PeerError,
    RunError,
    ScheduleError,
    UsageError,
)
from npu_pipe.ir.action import Action, FusedPair, Kind
from npu_pipe.ir.files import load_program, load_schedule, save_program, save_schedule
from npu_pipe.ir.program import Lane, Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.world import World
from npu_pipe.lowering.lower import lower
from npu_pipe.partition.partition import partition
from npu_pipe.schedules.registry import build_schedule
from npu_pipe.simulator.costs import Costs
from npu_pipe.timeline.timeline import Span, Timeline

if TYPE_CHECKING:
    from npu_pipe.pipeline import Pipeline
    from npu_pipe.planner.search import search
    from npu_pipe.runtime.loss import MeanLoss, SumLoss, TokenLoss, WithLoss
    from npu_pipe.runtime.tied import Tied
    from npu_pipe.runtime.window import Batch, Microbatches

__all__ = [
    "Action",
    "Batch",
    "CheckpointError",
    "ConfigError",
    "Costs",
    "CostsError",
    "DataError",
    "DeadlockError",
    "FusedPair",
    "HandshakeError",
    "Kind",
    "Lane",
    "MeanLoss",
    "Microbatches",
    "NpuPipeError",
    "PartitionError",
    "PeerError",
    "Pipeline",
    "Program",
    "RunError",
    "Schedule",
    "ScheduleError",
    "Span",
    "SumLoss",
    "Tied",
    "Timeline",
    "TokenLoss",
    "UsageError",
    "WithLoss",
    "World",
    "build_schedule",
    "check",
    "load_program",
    "load_schedule",
    "lower",
    "partition",
    "save_program",
    "save_schedule",
    "search",
    "simulate",
]

# Loaded when first used: torch takes seconds, and a search is not wanted by most.
_LATE = {
    "Batch": "npu_pipe.runtime.window",
    "MeanLoss": "npu_pipe.runtime.loss",
    "Microbatches": "npu_pipe.runtime.window",
    "Pipeline": "npu_pipe.pipeline",
    "SumLoss": "npu_pipe.runtime.loss",
    "Tied": "npu_pipe.runtime.tied",
    "TokenLoss": "npu_pipe.runtime.loss",
    "WithLoss": "npu_pipe.runtime.loss",
    "search": "npu_pipe.planner.search",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
