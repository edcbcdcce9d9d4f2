"""Pipeline: train a model whose stages lie on the ranks of a world.

with Pipeline({rank: stage_module}, schedule=schedule, loss=MeanLoss(fn), world=world) as pipe:
    for batch in batches:
        result = pipe.step(batch)          # (inputs, targets); gradients into .grad
        pipe.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from npu_pipe.comm.handshake import require_equal
from npu_pipe.comm.link import GlooLink
from npu_pipe.comm.measured import clock_offset_us, gather_timeline
from npu_pipe.comm.replicas import add_replica, set_aside
from npu_pipe.comm.team import Team
from npu_pipe.errors import ConfigError, DataError, PeerError
from npu_pipe.ir.files import schedule_hash
from npu_pipe.ir.plan import rank_plan
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.store import open_store
from npu_pipe.launch.world import World
from npu_pipe.lowering.evaluation import forward_only
from npu_pipe.lowering.lower import lower
from npu_pipe.runtime.boundary import flatten_value
from npu_pipe.runtime.executor import Ending, Executor
from npu_pipe.runtime.gradients import gradients_of, square_norm
from npu_pipe.runtime.loss import Loss, LossFunction, as_loss
from npu_pipe.runtime.microbatch import join_outputs
from npu_pipe.runtime.record import Recorder
from npu_pipe.runtime.stage import Stage
from npu_pipe.runtime.window import Batch, Call, Window, cut_batch, form_of_modules, scalar_loss
from npu_pipe.simulator.costs import Costs
from npu_pipe.timeline.timeline import Timeline

__all__ = ["Batch", "Pipeline", "StepResult"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """loss: of all windows of the step, the same number on every rank."""

    loss: float


class Pipeline:
    """One rank's part of the pipeline. All methods are collective: every rank calls them, in
    the same order. After an error that all ranks have found together, before anything ran, the
    pipeline can be used again; after any other it cannot."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        schedule: Schedule,
        loss: Loss | LossFunction,
        world: World,
        costs: Costs | None = None,
        prefetch: int = 2,
        timeout_s: float = 60,
    ) -> None:
        """Connect the ranks and compare what they are about to run.

        stages: the modules of this rank by stage index, as `schedule.stages_of(rank)` says.
        loss: how the last stage's output becomes a loss; see `npu_pipe.runtime.loss`. A bare
            function (output, target) -> scalar is taken for a MeanLoss.
        costs: for the order of transfers; None for equal ones.
        timeout_s: how long a rank waits for another before it gives up with PeerError.
        Raises ScheduleError, ConfigError (this rank's arguments; told on every rank),
        HandshakeError (ranks that disagree) or PeerError (a rank that does not come).
        """
        if schedule.ranks != world.size:
            raise ConfigError(
                "a schedule has one rank for each process",
                f"the schedule has {schedule.ranks} ranks, the world {world.size}",
                f"start {schedule.ranks} processes, or build the schedule for {world.size} ranks",
            )
        if not 0 < timeout_s <= 1e6:  # False for NaN
            raise ConfigError(
                "timeout_s is more than 0 and at most 1000000",
                f"it is {timeout_s}",
                "give the seconds that a rank may be late",
            )
        self.schedule = schedule
        self.world = world
        self._loss = as_loss(loss)
        self._team = Team(
            world.rank,
            world.size,
            open_store=lambda: open_store(world, timeout_s=timeout_s),
            timeout_s=timeout_s,
        )
        self._link = GlooLink(schedule, self._team.groups, control=self._team.control)
        self._team.on_break(self._link.forget)
        try:
            self._handshake(stages, costs, prefetch)
            program = lower(schedule, costs, prefetch=prefetch)
            evaluation = lower(forward_only(schedule), costs, prefetch=prefetch)
            plans = [rank_plan(each, world.rank) for each in (program, evaluation)]
            self._modules = dict(stages)
            self._stages = {
                index: Stage(index, module, splits=index in plans[0].split_stages)
                for index, module in stages.items()
            }
            self._train, self._evaluate = (
                Executor(plan, self._stages, link=self._link) for plan in plans
            )
            for executor in (self._train, self._evaluate):
                self._team.on_break(executor.forget)
            self._evaluation = evaluation.schedule
            self._offset_us = clock_offset_us(self._team.control)
            self._recorded = Recorder()
        except BaseException:
            self.close()
            raise

    def step(self, *batches: Batch) -> StepResult:
        """One update's worth of forwards and backwards: gradients are added to `.grad`.

        Several batches are windows run one after another, and give the gradient and the loss of
        the joined batch: accumulation by one denominator. (Calling `step` twice adds two
        gradients, each normalised by itself.)
        Raises, on every rank alike, DataError for a batch that cannot be cut or has nothing to
        normalise by; PeerError when another rank fails.
        """
        windows, denominator = self._prepare(batches, Call.TRAIN)
        total = torch.zeros((), dtype=torch.float64)
        before = set_aside(self._modules) if self.schedule.mirrored else []
        for window in windows:

            def end(
                microbatch: int, output: Any, targets: Sequence[Any] = window.targets
            ) -> tuple[list[Tensor], list[Tensor]]:
                value = scalar_loss(self._loss, output, targets[microbatch])
                total.add_(value.detach())
                return [value], [torch.ones_like(value) / denominator]

            self._recorded = self._run(self._train, window, end)
        if self.schedule.mirrored:
            with self._team.unbroken(lambda: "the exchange of gradients"):
                add_replica(self._modules, before, groups=self._team.groups)
        return self._result(total, denominator)

    def evaluate(self, batch: Batch) -> StepResult:
        """The loss of a batch, forward only; modules are run in the mode they are in."""
        (window,), denominator = self._prepare((batch,), Call.EVALUATE)
        total = torch.zeros((), dtype=torch.float64)

        def end(microbatch: int, output: Any) -> tuple[list[Tensor], list[Tensor]]:
            total.add_(scalar_loss(self._loss, output, window.targets[microbatch]))
            return [], []

        with torch.no_grad():
            self._run(self._evaluate, window, end)
        return self._result(total, denominator)

    def predict(self, inputs: Any) -> Any:
        """The last stage's outputs for a batch of inputs, forward only, microbatches joined.

        On the rank of the last stage; None on the others.
        """
        (window,), _ = self._prepare(((inputs, None),), Call.PREDICT)
        outputs: dict[int, Any] = {}
        last = self._stages.get(self.schedule.stages - 1)

        def end(microbatch: int, output: Any) -> tuple[list[Tensor], list[Tensor]]:
            assert last is not None
            meta, tensors = flatten_value(output, "the output of the model")
            outputs[microbatch] = meta.value(last.leaving(tensors))
            return [], []

        with torch.no_grad():
            self._run(self._evaluate, window, end)
        self._team.gather(None)
        return join_outputs([outputs[i] for i in sorted(outputs)]) if outputs else None

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
        squares = self._team.meet("clip_gradients", lambda: square_norm(gradients_of(counted)))
        norm = math.sqrt(math.fsum(squares))
        scale = max_norm / (norm + 1e-6)
        if scale < 1:
            for gradient in gradients_of(self._modules.values()):
                gradient.mul_(scale)
        return norm

    def timeline(self) -> Timeline:
        """When each action of the last trained window ran, on all ranks: the measured timeline."""
        return gather_timeline(
            self.schedule,
            self._recorded.events,
            gather=lambda mine: self._team.meet("timeline", lambda: mine),
            offset_us=self._offset_us,
        )

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank, on every rank."""
        return self._team.meet("gather", lambda: value)

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

    def _prepare(self, batches: Sequence[Batch], call: Call) -> tuple[list[Window], float]:
        """Cut the batches up and agree on them. Returns the windows and the denominator."""
        first = 0 in self._stages
        last = self.schedule.stages - 1 in self._stages and call is not Call.PREDICT

        def prepare() -> dict[str, Any]:
            if not batches:
                raise DataError(
                    "a step runs at least one batch",
                    "none was given",
                    "call step((inputs, targets))",
                )
            microbatches = self.schedule.microbatches
            windows.extend(
                cut_batch(batch, microbatches, first=first, last=last) for batch in batches
            )
            denominator = None
            if last:
                denominator = self._loss.denominator([t for w in windows for t in w.targets])
                if not denominator > 0:
                    raise DataError(
                        "a loss is normalised by something positive",
                        f"the denominator of this step is {denominator}",
                        "give at least one valid token",
                    )
            return {
                "number of batches": len(batches),
                "form of the inputs": [w.signature for w in windows] if first else None,
                "denominator": denominator,
                "modules": form_of_modules(self._modules.values()),
            }

        windows: list[Window] = []
        answers = self._team.meet(call.value, prepare)
        modules = "".join(answer.pop("modules") for answer in answers)
        require_equal(answers, cure="call the pipeline alike on every rank")
        known = {fact: value for a in answers for fact, value in a.items() if value is not None}
        mode = f"{call is Call.TRAIN} {hashlib.sha256(modules.encode()).hexdigest()[:16]}"
        signatures = [f"{mode} {form}" for form in known["form of the inputs"]]
        windows = [replace(w, signature=s) for w, s in zip(windows, signatures, strict=True)]
        return windows, known.get("denominator", 1.0)

    def _run(self, executor: Executor, window: Window, end: Ending) -> Recorder:
        recorder = Recorder()
        schedule = self.schedule if executor is self._train else self._evaluation
        self._link.start_window(schedule, window.signature, recorder)
        with self._team.unbroken(lambda: str(executor.at)):
            executor.run(window.inputs, end, recorder)
        return recorder

    def _result(self, total: Tensor, denominator: float) -> StepResult:
        """The loss, from the ranks that hold the last stage: two of them with replicas."""
        mine = float(total) if self.schedule.stages - 1 in self._stages else 0.0
        return StepResult(math.fsum(self._team.gather(mine)) / denominator)
