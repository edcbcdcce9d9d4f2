"""npu_pipe designs, proves, predicts and runs pipeline-parallel training.

    schedule = npu_pipe.build_schedule("1f1b", ranks=4, microbatches=8)
    npu_pipe.check(schedule)
    timeline = npu_pipe.simulate(schedule, npu_pipe.Costs.uniform(4))

Importing npu_pipe imports no torch; the names that need it load it when first used.
"""

from __future__ import annotations

from npu_pipe.api import check, simulate
from npu_pipe.errors import DeadlockError, NpuPipeError, PeerError, ScheduleError
from npu_pipe.ir.action import Action, FusedPair, Kind
from npu_pipe.ir.files import load_schedule, save_schedule
from npu_pipe.ir.program import Lane, Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.lowering.lower import lower
from npu_pipe.schedules.registry import build_schedule
from npu_pipe.simulator.costs import Costs
from npu_pipe.timeline.timeline import Span, Timeline

__all__ = [
    "Action",
    "Costs",
    "DeadlockError",
    "FusedPair",
    "Kind",
    "Lane",
    "NpuPipeError",
    "PeerError",
    "Program",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "build_schedule",
    "check",
    "load_schedule",
    "lower",
    "save_schedule",
    "simulate",
]
