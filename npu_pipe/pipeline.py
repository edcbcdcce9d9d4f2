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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from npu_pipe.comm.executors import Executors
from npu_pipe.comm.links import OpenLink, link_for
from npu_pipe.comm.measured import clock_offset_us, gather_footprint, gather_timeline
from npu_pipe.comm.sums import Sums
from npu_pipe.comm.team import Team
from npu_pipe.comm.team_link import TeamLink
from npu_pipe.comm.terms import agree_on_terms, check_terms
from npu_pipe.comm.tied import TiedCopies
from npu_pipe.comm.windows import Agreed, agree_on_windows
from npu_pipe.device.choose import device_of_modules
from npu_pipe.device.naming import named
from npu_pipe.errors import ConfigError, DataError, PeerError
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.limits import limits_of
from npu_pipe.launch.store import open_store
from npu_pipe.launch.world import World
from npu_pipe.lowering.lower import lower
from npu_pipe.ops.ranks import Ranks
from npu_pipe.ops.together import Together
from npu_pipe.runtime.gradients import counted_once, gradients_of
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
from npu_pipe_kernels.cut import Squares, squares_of, what_is_whole

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
        tensor_parallel: Ranks | None = None,
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
        tensor_parallel: the ranks that the layers of these stages are cut over, each in a pipeline
            of its own: all of them fail together, and `clip_gradients` has one norm.
        link: how transfers travel: `npu_pipe.comm.links`; None: as suits the modules' device.
        Raises ScheduleError, ConfigError (this rank's arguments; told on every rank),
        HandshakeError (ranks that disagree) or PeerError (a rank that does not come).
        """
        check_terms(schedule, processes=world.size, timeout_s=timeout_s, connect_s=connect_s)
        self.schedule = schedule
        self.world = world
        self._loss = None if loss is None else as_loss(loss)
        self._together = None if tensor_parallel is None else Together(tensor_parallel)
        self._team = Team(
            world.rank,
            world.size,
            address=world.address,
            open_store=lambda: open_store(world, timeout_s=connect_s),
            timeout_s=timeout_s,
            connect_s=connect_s,
            members=world.members,
            beside=self._together.members if self._together else (),
        )
        limits = limits_of(schedule, local_rank=world.local_rank, tied=tied)
        self._open_link = link or link_for(
            stages.values(), schedule=schedule, tied=tied, check=limits
        )
        self._lower = partial(lower, costs=costs, prefetch=prefetch)
        self._stages = {index: Stage(index, module) for index, module in stages.items()}
        self._executors = Executors(schedule, self._stages, lower=self._lower, team=self._team)
        try:
            agree_on_terms(
                self._team,
                stages,
                schedule=schedule,
                costs=costs,
                prefetch=prefetch,
                loss=self._loss,
                look=partial(what_is_whole, ranks=tensor_parallel),
            )
            if self._together is not None:
                self._together.join(self._team)
            self._link = self._connected()
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
            self._modules = dict(stages)
            self._last = self._stages.get(schedule.stages - 1)
            self._executors.of(None, self._link)
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
        """Scale all gradients, of all stages and their parts, so that their joint 2-norm is at most
        `max_norm`.

        Returns the norm before, the same on every rank; as torch's clip_grad_norm_ for the
        whole model.
        """
        places, rank = self.schedule.placement, self.world.rank

        def squares() -> Squares:
            counted, elsewhere = counted_once(self._modules, placement=places, rank=rank)
            without = elsewhere | self._tied.repeated()
            return squares_of(counted, without=without, digits=self._device.widest)

        with self._recorded.during(Phase.CLIPPING):
            everybody = self._team.meet_all("clip_gradients", squares)
            whole = math.fsum(square for square, _ in self._team.own(everybody))
            norm = math.sqrt(math.fsum((whole, *(square for _, square in everybody))))
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

    def patience(self, timeout_s: float) -> AbstractContextManager[None]:
        """In the block, a rank has failed only without progress for so long, if that is more than
        the pipeline's own time-out: for what one rank takes longer for than others.

        with pipe.patience(600):
            save_my_stage()
            pipe.gather(None)  # all have
        """
        return self._team.patience(timeout_s)

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
        """A JSON value of each rank, on every rank: also of those that share layers with its
        ranks, in the order of their ranks in the job."""
        return self._team.meet_all("gather", lambda: value)

    def reset(self) -> None:
        """Connect the ranks anew, after an error that each of them has caught.

        What was under way is dropped. Gradients may be half added: zero them. Raises PeerError
        when a rank does not come within `connect_s`, and RunError where layers are cut over ranks
        of devices, whose communicator is gone for good.
        """
        try:
            if self._together is not None:
                self._together.require_renewable()
            self._team.reset()
            self._link = self._connected()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the process groups. Waits for nobody; the pipeline is not used afterwards."""
        self._team.close()
        if self._together is not None:
            self._together.close()
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

    def _connected(self) -> TeamLink:
        link = self._open_link(self._team)
        return link if self._together is None else self._together.opened(link, self._team)

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
            shared=self._team.shared,
            meet=self._team.meet_all,
        )

    def _forget(self) -> None:
        self._link.forget()
        self._executors.forget()

    def _run(self, evaluated: int | None, window: Agreed, tally: Tally) -> Recorder:
        executor = self._executors.of(evaluated, self._link)
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
