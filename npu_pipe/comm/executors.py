"""Executors: what runs the windows of a rank, one for each schedule that they follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from npu_pipe.comm.team import Team
from npu_pipe.ir.plan import rank_plan
from npu_pipe.ir.program import Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.lowering.evaluation import forward_only
from npu_pipe.runtime.executor import Executor, Link
from npu_pipe.runtime.stage import Stage

__all__ = ["Executors"]


class Executors:
    """Of training steps, and of evaluations by their number of microbatches; each is made when it
    is first asked for, until the team breaks off."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        *,
        lower: Callable[[Schedule], Program],
        team: Team,
    ) -> None:
        self._schedule = schedule
        self._stages = stages
        self._lower = lower
        self._team = team
        self._made: dict[int | None, Executor] = {}

    def of(self, microbatches: int | None, link: Link) -> Executor:
        """Of training steps, or of evaluations with so many microbatches."""
        if microbatches not in self._made:
            schedule = self._schedule
            if microbatches is not None:
                schedule = forward_only(schedule, microbatches)
            self._made[microbatches] = Executor(
                rank_plan(self._lower(schedule), self._team.rank),
                self._stages,
                link=link,
                board=self._team.board,
                numbers=self._team.numbers,
            )
        return self._made[microbatches]

    def forget(self) -> None:
        """Drop all that a broken window left behind: after an error, or at the end."""
        for executor in self._made.values():
            executor.forget()
        self._made.clear()
