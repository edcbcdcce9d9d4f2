"""Pipeline: train a model whose stages lie on the ranks of a world.

with Pipeline({rank: stage_module}, schedule=schedule, loss=MeanLoss(fn), world=world) as pipe:
    for batch in batches:
        result = pipe.step(batch)          # (inputs, targets); gradients into .grad
        pipe.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from npu_pipe.comm.handshake import require_equal
from npu_pipe.comm.link import GlooLink
from npu_pipe.comm.measured import clock_offset_us, gather_timeline
from npu_pipe.comm.replicas import add_replica, set_aside
from npu_pipe.comm.team import Team
from npu_pipe.comm.windows import Agreed, agree_on_windows
from npu_pipe.errors import ConfigError, PeerError
from npu_pipe.ir.files import schedule_hash
from npu_pipe.ir.plan import RankPlan, rank_plan
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.store import open_store
from npu_pipe.launch.world import World
from npu_pipe.lowering.evaluation import forward_only
from npu_pipe.lowering.lower import lower
from npu_pipe.runtime.executor import Executor
from npu_pipe.runtime.gradients import gradients_of, square_norm
from npu_pipe.runtime.loss import Loss, LossFunction, as_loss
from npu_pipe.runtime.microbatch import join_outputs
from npu_pipe.runtime.record import Recorder
from npu_pipe.runtime.stage import Stage
from npu_pipe.runtime.tally import Tally
from npu_pipe.runtime.window import AnyBatch, Batch, Call, Microbatches
from npu_pipe.simulator.costs import Costs
from npu_pipe.timeline.phase import Phase
from npu_pipe.timeline.timeline import Timeline

__all__ = ["Batch", "Microbatches", "Pipeline", "StepResult"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """loss: of all windows of the step, with auxiliary losses; the same number on every rank.

    losses: per microbatch, what the loss function gave, on the rank of the last stage (with
    replicas: for the microbatches that ended there); empty elsewhere.
    outputs: likewise what the last stage returned, where asked for.
    None of them holds a graph.
    """

    loss: float
    losses: tuple[Tensor, ...]
    outputs: tuple[Any, ...]


class Pipeline:
    """One rank's part of the pipeline. All methods are collective: every rank calls them, in
    the same order. After an error that all ranks have found together, before anything ran, the
    pipeline can be used again; after any other, `reset` makes it so."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        schedule: Schedule,
        loss: Loss | LossFunction,
        world: World,
        costs: Costs | None = None,
        prefetch: int = 2,
        timeout_s: float = 8,
        connect_s: float = 60,
    ) -> None:
        """Connect the ranks and compare what they are about to run.

        stages: the modules of this rank by stage index, as `schedule.stages_of(rank)` says.
        loss: how the last stage's output becomes a loss; see `npu_pipe.runtime.loss`. A bare
            function (output, target) -> scalar is taken for a MeanLoss.
        costs: for the order of transfers; None for equal ones.
        timeout_s: a rank that gets no further for this long, while another waits, has failed.
        connect_s: how long the ranks may take to come here.
        Raises ScheduleError, ConfigError (this rank's arguments; told on every rank),
        HandshakeError (ranks that disagree) or PeerError (a rank that does not come).
        """
        if schedule.ranks != world.size:
            raise ConfigError(
                "a schedule has one rank for each process",
                f"the schedule has {schedule.ranks} ranks, the world {world.size}",
                f"start {schedule.ranks} processes, or build the schedule for {world.size} ranks",
            )
        for name, seconds in (("timeout_s", timeout_s), ("connect_s", connect_s)):
            if not 0 < seconds <= 1e6:  # False for NaN
                raise ConfigError(
                    f"{name} is more than 0 and at most 1000000",
                    f"it is {seconds}",
                    "give the seconds that a rank may be late",
                )
        self.schedule = schedule
        self.world = world
        self._loss = as_loss(loss)
        self._team = Team(
            world.rank,
            world.size,
            address=world.address,
            open_store=lambda: open_store(world, timeout_s=connect_s),
            timeout_s=timeout_s,
            connect_s=connect_s,
        )
        self._link = GlooLink(schedule, self._team.groups, control=self._team.control)
        self._team.on_break(self._link.forget)
        try:
            self._handshake(stages, costs, prefetch)
            self._lower = partial(lower, costs=costs, prefetch=prefetch)
            plan = rank_plan(self._lower(schedule), world.rank)
            self._modules = dict(stages)
            self._stages = {
                index: Stage(index, module)
                for index, module in stages.items()
            }
            self._last = self._stages.get(schedule.stages - 1)
            self._train = self._executor(plan)
            self._evaluations: dict[int, Executor] = {}  # by number of microbatches
            self._offset_us = clock_offset_us(self._team)
            self._recorded = Recorder()
        except BaseException:
            self.close()
            raise

    def step(self, *batches: AnyBatch, outputs: bool = False) -> StepResult:
        """One update's worth of forwards and backwards: gradients are added to `.grad`.

        Several batches are windows run one after another, and give the gradient and the loss of
        the joined batch: accumulation by one denominator. (Calling `step` twice adds two
        gradients, each normalised by itself.)
        outputs: whether to keep what the last stage returns.
        Raises, on every rank alike, DataError for a batch that cannot be cut or has nothing to
        normalise by; PeerError when another rank fails.
        """
        windows = self._prepare(batches, Call.TRAIN, self.schedule.microbatches)
        tally = Tally(last=self._last if outputs else None)
        before = set_aside(self._modules) if self.schedule.mirrored else []
        for window in windows:
            self._recorded = self._run(self._train, window, tally)
        if self.schedule.mirrored:
            with (
                self._recorded.during(Phase.REDUCTION),
                self._team.unbroken(),
            ):
                add_replica(self._modules, before, groups=self._team.groups)
        return self._result(tally)

    def evaluate(
        self, batch: AnyBatch, *, microbatches: int | None = None, outputs: bool = False
    ) -> StepResult:
        """The loss of a batch, forward only; modules are run in the mode they are in.

        microbatches: how many to cut it into; by default as many as in training, or the number
            of rows where there are fewer.
        """
        (window,) = self._prepare((batch,), Call.EVALUATE, microbatches)
        tally = Tally(last=self._last if outputs else None)
        with torch.no_grad():
            self._run(self._evaluation(window.microbatches), window, tally)
        return self._result(tally)

    def predict(
        self,
        inputs: Any,
        *,
        keywords: Mapping[str, Any] | None = None,
        microbatches: int | None = None,
    ) -> Any:
        """The last stage's outputs for a batch of inputs, forward only, microbatches joined.

        On the rank of the last stage; None on the others.
        """
        batch = Batch(inputs, None, keywords or {})
        (window,) = self._prepare((batch,), Call.PREDICT, microbatches)
        tally = Tally(last=self._last)
        with torch.no_grad():
            self._run(self._evaluation(window.microbatches), window, tally)
        outputs = self._result(tally).outputs
        return join_outputs(outputs) if outputs else None

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients, of all stages, so that their joint 2-norm is at most `max_norm`.

        Returns the norm before, the same on every rank; as torch's clip_grad_norm_ for the
        whole model.
        """
        # Of two replicas of a stage the first counts.
        counted = [
            module
            for stage, module in self._modules.items()
            if self.schedule.placement[stage] == self.world.rank
        ]
        with self._recorded.during(Phase.CLIPPING):
            squares = self._team.meet("clip_gradients", lambda: square_norm(gradients_of(counted)))
            norm = math.sqrt(math.fsum(squares))
            scale = max_norm / (norm + 1e-6)
            if scale < 1:
                for gradient in gradients_of(self._modules.values()):
                    gradient.mul_(scale)
        return norm

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Record what the block takes as a phase of the last step: `timeline` shows it.

        with pipe.phase(Phase.OPTIMIZER):
            optimizer.step()
        """
        return self._recorded.during(phase)

    def timeline(self) -> Timeline:
        """When each action of the last trained window ran, on all ranks: the measured timeline,
        with the phases of its step up to now."""
        return gather_timeline(
            self.schedule,
            self._recorded,
            gather=lambda mine: self._team.meet("timeline", lambda: mine),
            offset_us=self._offset_us,
        )

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank, on every rank."""
        return self._team.meet("gather", lambda: value)

    def reset(self) -> None:
        """Connect the ranks anew, after an error that each of them has caught.

        What was under way is dropped. Gradients may be half added: zero them. Raises PeerError
        when a rank does not come within `connect_s`.
        """
        self._team.reset()

    def close(self) -> None:
        """Leave the process groups. Waits for nobody; the pipeline is not used afterwards."""
        self._team.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._team.is_open and not isinstance(error, PeerError):
            self._team.tell(error, "between two calls")
        self.close()

    def _handshake(
        self, stages: Mapping[int, nn.Module], costs: Costs | None, prefetch: int
    ) -> None:
        def prepare() -> dict[str, Any]:
            wanted = self.schedule.stages_of(self.world.rank)
            if sorted(stages) != list(wanted):
                raise ConfigError(
                    "each rank is given the modules of the stages that the schedule places on it",
                    f"it was given stages {sorted(stages)}, and holds {list(wanted)}",
                    "build the modules of schedule.stages_of(rank)",
                )
            return {
                "number of microbatches": self.schedule.microbatches,
                "placement": list(self.schedule.placement),
                "schedule": f"{self.schedule.name} {schedule_hash(self.schedule)[:12]}",
                "costs": repr(costs),
                "prefetch": prefetch,
                "loss": type(self._loss).__name__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            }

        answers = self._team.meet("Pipeline", prepare)
        require_equal(answers, cure="start all ranks with the same code, job and environment")

    def _prepare(
        self, batches: Sequence[AnyBatch], call: Call, microbatches: int | None
    ) -> list[Agreed]:
        """Cut the batches up and agree on them with the other ranks."""
        last = self._last is not None and call is not Call.PREDICT
        return agree_on_windows(
            batches,
            call,
            microbatches,
            usual=self.schedule.microbatches,
            first=0 in self._stages,
            loss=self._loss if last else None,
            modules=self._modules.values(),
            meet=self._team.meet,
        )

    def _evaluation(self, microbatches: int) -> Executor:
        if microbatches not in self._evaluations:
            schedule = forward_only(self.schedule, microbatches)
            plan = rank_plan(self._lower(schedule), self.world.rank)
            self._evaluations[microbatches] = self._executor(plan)
        return self._evaluations[microbatches]

    def _executor(self, plan: RankPlan) -> Executor:
        executor = Executor(plan, self._stages, link=self._link, board=self._team.board)
        self._team.on_break(executor.forget)
        return executor

    def _run(self, executor: Executor, window: Agreed, tally: Tally) -> Recorder:
        recorder = Recorder()
        function = None
        if window.mine.targets:
            function = recorder.timed(Phase.LOSS, self._loss.function)
        end = tally.window(function, window.mine.targets, window.scales)
        self._link.start_window(executor.schedule, window.signatures, recorder)
        with self._team.unbroken():
            executor.run(window.mine.inputs, window.mine.keywords, end, recorder)
        return recorder

    def _result(self, tally: Tally) -> StepResult:
        loss = math.fsum(self._team.gather(tally.total))
        return StepResult(loss, tally.losses, tally.outputs)
