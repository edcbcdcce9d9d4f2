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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from npu_pipe.comm.handshake import require_equal
from npu_pipe.comm.links import OpenLink, link_for
from npu_pipe.comm.measured import clock_offset_us, gather_footprint, gather_timeline
from npu_pipe.comm.sums import Sums
from npu_pipe.comm.team import Team
from npu_pipe.comm.tied import TiedCopies
from npu_pipe.comm.windows import Agreed, agree_on_windows
from npu_pipe.comm.wrapped import wrappers_in
from npu_pipe.device.choose import device_of_modules
from npu_pipe.device.naming import named
from npu_pipe.errors import ConfigError, DataError, PeerError
from npu_pipe.ir.files import schedule_hash
from npu_pipe.ir.plan import rank_plan
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.store import open_store
from npu_pipe.launch.world import World
from npu_pipe.lowering.evaluation import forward_only
from npu_pipe.lowering.lower import lower
from npu_pipe.runtime.executor import Executor
from npu_pipe.runtime.gradients import gradients_of, square_norm
from npu_pipe.runtime.loss import Loss, LossFunction, as_loss
from npu_pipe.runtime.memory import watch_memory
from npu_pipe.runtime.microbatch import join_outputs
from npu_pipe.runtime.record import Recorder
from npu_pipe.runtime.stage import Stage
from npu_pipe.runtime.tally import StepResult, Tally
from npu_pipe.runtime.tied import Tied
from npu_pipe.runtime.window import Batch, Call, GivenBatch, Microbatches
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.footprint import Footprint
from npu_pipe.timeline.phase import Phase
from npu_pipe.timeline.timeline import Timeline

__all__ = ["Batch", "Microbatches", "Pipeline", "StepResult"]


class Pipeline:
    """One rank's part of the pipeline. All methods are collective: every rank calls them, in
    the same order. After an error that all ranks have found together, before anything ran, the
    pipeline can be used again; after any other, `reset` makes it so."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        schedule: Schedule,
        loss: Loss | LossFunction | None,
        world: World,
        costs: Costs | None = None,
        prefetch: int = 2,
        timeout_s: float = 8,
        connect_s: float = 60,
        tied: Sequence[Tied] = (),
        link: OpenLink | None = None,
    ) -> None:
        """Connect the ranks and compare what they are about to run.

        stages: the modules of this rank by stage index, as `schedule.stages_of(rank)` says.
        loss: how the last stage's output becomes a loss; see `npu_pipe.runtime.loss`. A bare
            function (output, target) -> scalar is taken for a MeanLoss. None: forward only.
        costs: for the order of transfers; None for equal ones.
        timeout_s: a rank that gets no further for this long, while another waits, has failed.
        connect_s: how long the ranks may take to come here.
        tied: parameters with copies in several stages; all copies are given the first one's value.
        link: how transfers travel: `npu_pipe.comm.links`; None: as suits the modules' device.
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
        self._loss = None if loss is None else as_loss(loss)
        self._team = Team(
            world.rank,
            world.size,
            address=world.address,
            open_store=lambda: open_store(world, timeout_s=connect_s),
            timeout_s=timeout_s,
            connect_s=connect_s,
            members=world.members,
        )
        self._open_link = link or link_for(stages.values(), schedule=schedule, tied=tied)
        self._executors: dict[int | None, Executor] = {}  # of evaluations by microbatches
        try:
            self._handshake(stages, costs, prefetch)
            self._link = self._open_link(self._team)
        except BaseException:
            self._team.close()
            raise
        self._device = device_of_modules(stages.values())
        self._team.on_break(self._forget)
        self._team.on_interrupt(lambda: self._link.interrupt())
        try:
            self._tied = TiedCopies(tied, stages, schedule=schedule, team=self._team)
            self._sums = Sums(
                stages, mirrored=bool(schedule.mirrored), tied=self._tied, team=self._team
            )
            self._lower = partial(lower, costs=costs, prefetch=prefetch)
            self._modules = dict(stages)
            self._stages = {index: Stage(index, module) for index, module in stages.items()}
            self._last = self._stages.get(schedule.stages - 1)
            self._executor(None)
            self._offset_us = clock_offset_us(self._team)
            self._recorded = Recorder()
            self._watched: Callable[[], Recorder] | None = None  # a recorder of memory
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it can be used: not after `close`, nor after an error that broke it off."""
        return self._team.is_open

    def step(self, *batches: GivenBatch, outputs: bool = False) -> StepResult:
        """One update's worth of forwards and backwards: gradients are added to `.grad`.

        Several batches are windows run one after another, and give the gradient and the loss of
        the joined batch: accumulation by one denominator. (Calling `step` twice adds two
        gradients, each normalised by itself.)
        outputs: whether to keep what the last stage returns.
        Raises, on every rank alike, DataError for a batch that cannot be cut or has nothing to
        normalise by; PeerError when another rank fails.
        """
        if self._loss is None:
            raise ConfigError(
                "a step needs a loss",
                "this pipeline was made without one",
                "give Pipeline a loss, or call evaluate or predict",
            )
        windows = self._prepare(batches, Call.TRAIN, self.schedule.microbatches)
        tally = Tally(outputs=outputs)
        before = self._sums.set_aside()
        with self._sums.during_windows():
            for window in windows:
                self._recorded = self._run(None, window, tally)
        if self._sums:
            with self._recorded.during(Phase.REDUCTION):
                self._sums.add(before, finish=self._link.finish)
        return self._result(tally)

    def evaluate(
        self, batch: GivenBatch, *, microbatches: int | None = None, outputs: bool = False
    ) -> StepResult:
        """The loss of a batch, forward only; modules are run in the mode they are in.

        microbatches: how many to cut it into; by default as many as in training, or the number
            of rows where there are fewer.
        outputs: whether to keep what the last stage returns; then there may be no targets.
        """
        if self._loss is None and not outputs:
            raise ConfigError(
                "the loss of a batch needs a loss function",
                "this pipeline was made without one",
                "give Pipeline a loss, or ask for outputs=True",
            )
        (window,) = self._prepare((batch,), Call.EVALUATE, microbatches, unrated=outputs)
        tally = Tally(outputs=outputs)
        with torch.no_grad():
            self._run(window.microbatches, window, tally)
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
        tally = Tally(outputs=True)
        with torch.no_grad():
            self._run(window.microbatches, window, tally)
        outputs = self._result(tally).outputs
        return join_outputs(outputs) if outputs else None

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients, of all stages, so that their joint 2-norm is at most `max_norm`.

        Returns the norm before, the same on every rank; as torch's clip_grad_norm_ for the
        whole model.
        """
        # Of two replicas of a stage the first counts.
        places, rank = self.schedule.placement, self.world.rank
        counted = [m for stage, m in self._modules.items() if places[stage] == rank]

        def square() -> float:
            own = gradients_of(counted, without=self._tied.repeated())
            return square_norm(own, digits=self._device.widest)

        with self._recorded.during(Phase.CLIPPING):
            squares = self._team.meet("clip_gradients", square)
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

    @contextmanager
    def watching_memory(self) -> Iterator[None]:
        """Count what this rank's tensors take in the steps inside, for `footprint`. They are
        slower, so measure times in another step."""
        with watch_memory(self._modules) as self._watched:
            try:
                yield
            finally:
                self._watched = None

    def footprint(self) -> Footprint:
        """What all ranks held in the last window, if its step was run in `watching_memory`.

        Raises ConfigError, on every rank, if it was not.
        """
        return gather_footprint(
            self.schedule,
            self._recorded,
            gather=lambda mine: self._team.meet("footprint", lambda: mine),
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
        self._link = self._open_link(self._team)

    def close(self) -> None:
        """Leave the process groups. Waits for nobody; the pipeline is not used afterwards."""
        self._team.close()
        self._forget()

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
            wrappers_in(stages.values())  # or it is refused
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
        self,
        batches: Sequence[GivenBatch],
        call: Call,
        microbatches: int | None,
        *,
        unrated: bool = False,
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
            unrated=unrated,
            modules=self._modules.values(),
            meet=self._team.meet,
        )

    def _executor(self, microbatches: int | None) -> Executor:
        """Of training steps, or of evaluations with so many microbatches."""
        if microbatches not in self._executors:
            schedule = self.schedule
            if microbatches is not None:
                schedule = forward_only(schedule, microbatches)
            self._executors[microbatches] = Executor(
                rank_plan(self._lower(schedule), self.world.rank),
                self._stages,
                link=self._link,
                board=self._team.board,
            )
        return self._executors[microbatches]

    def _forget(self) -> None:
        self._link.forget()
        for executor in self._executors.values():
            executor.forget()
        self._executors.clear()

    def _run(self, evaluated: int | None, window: Agreed, tally: Tally) -> Recorder:
        executor = self._executor(evaluated)
        recorder = (self._watched or self._link.recorder)()
        function = None
        if self._loss is not None and window.mine.targets:
            function = recorder.timed(Phase.LOSS, self._loss.function)
        end = tally.window(function, window.mine.targets, window.scales)
        self._link.start_window(executor.schedule, window.signatures, recorder)
        with self._team.unbroken(), named(recorder, self._device) as clock:
            executor.run(window.mine.inputs, window.mine.keywords, end, clock)
        return recorder

    def _result(self, tally: Tally) -> StepResult:
        with self._team.unbroken():  # a device tells of its errors where a value is read
            mine = tally.total, tally.needs_gradient
        totals, needed = zip(*self._team.gather(mine), strict=True)
        if False in needed and True not in needed:
            raise DataError(
                "a step computes gradients",
                "no loss of it needs one: all parameters are frozen, or a stage detaches its value",
                "train some parameters, or call evaluate",
            )
        return StepResult(math.fsum(totals), tally.losses, tally.outputs)
