"""What all schedules do: step, eval, and the Pipeline underneath."""

from __future__ import annotations

import atexit
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from npu_pipe.errors import ConfigError, DataError
from npu_pipe.launch.group import group_timeout_s
from npu_pipe.pipeline import Microbatches, Pipeline
from npu_pipe.runtime.loss import Loss, LossFunction, MeanLoss, SumLoss
from npu_pipe.schedules.registry import build_schedule
from npu_pipe.torch_api.microbatches import Given, Target, cut
from npu_pipe.torch_api.outputs import merge_outputs
from npu_pipe.torch_api.stage import PipelineStage

__all__ = ["PipelineScheduleMulti", "PipelineScheduleSingle"]


class _PipelineSchedule(ABC):
    """The stages of this rank and how they are run.

    The ranks are connected by the first step or eval, and not before: that is where torch too
    first needs all of them, so a script that makes its schedules in another order on each rank,
    or with other collective calls in between, does not hang.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None,
        *,
        args_chunk_spec: Any,
        kwargs_chunk_spec: Any,
        output_merge_spec: Any,
        scale_grads: bool,
    ) -> None:
        _require_stages(stages)
        first = stages[0]
        if first.num_stages != len(stages) * first.group_size:
            raise ConfigError(
                "each rank holds the same number of stages",
                f"{len(stages)} of {first.num_stages} stages were given on each of "
                f"{first.group_size} ranks",
                f"give stages of a model of {len(stages) * first.group_size}",
            )
        self.schedule = build_schedule(
            self.family,
            ranks=first.group_size,
            microbatches=n_microbatches,
            chunks=len(stages),
        )
        self.scale_grads = scale_grads
        self._stages = list(stages)
        self._n_microbatches = n_microbatches
        self._loss = _loss(loss_fn, scale_grads)
        self._args_chunk_spec = args_chunk_spec
        self._kwargs_chunk_spec = kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self._pipeline: Pipeline | None = None
        self._closing: Callable[[], Any] = _nothing

    @property
    @abstractmethod
    def family(self) -> str:
        """The name of the schedule in `npu_pipe.build_schedule`."""

    @property
    def pipeline(self) -> Pipeline:
        """The Pipeline underneath, for what torch has no name for: `clip_gradients`, `timeline`.

        Made by the first call, and anew after a failure; that is collective.
        """
        if self._pipeline is None or not self._pipeline.is_open:
            self.close()
            # A script may let ranks wait while one saves a checkpoint, as long as torch lets it.
            patience_s = group_timeout_s()
            self._pipeline = Pipeline(
                {stage.stage_index: stage.submod for stage in self._stages},
                schedule=self.schedule,
                loss=self._loss,
                world=self._stages[0].world,
                timeout_s=patience_s,
                connect_s=patience_s,
            )
            # Scripts for torch have no word for the end.
            closing = weakref.finalize(self, _closed_at_exit(self._pipeline))
            closing.atexit = False
            self._closing = closing
        return self._pipeline

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a batch forwards and backwards; gradients are added to `.grad`, and final on return.

        args: of the first stage; given on its rank, ignored on others.
        kwargs: for the stages of this rank.
        target: for the loss; given on the rank of the last stage, ignored on others.
        losses: a list that becomes the loss of each microbatch, on the rank of the last stage.
        arg_mbs, kwarg_mbs, target_mbs: the same cut into microbatches already: tuples, dicts and
            targets.
        Returns the outputs of the batch on the rank of the last stage if `return_outputs`, else
        None. Neither they nor the losses hold the graph.
        Without a loss_fn this is `eval`.
        Raises, on every rank alike, DataError (a ValueError) for arguments that do not fit, and
        PeerError (a RuntimeError) for the failure of another rank.
        """
        given = Given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, loss_kwargs)
        return self._run(given, losses, return_outputs, backward=self._loss is not None)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `step`, forwards only and without gradients; the target may be left out."""
        given = Given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, loss_kwargs)
        return self._run(given, losses, return_outputs, backward=False)

    def close(self) -> None:
        """Leave the other ranks; the next step connects anew. Also done when this is deleted."""
        self._closing()
        self._closing = _nothing
        self._pipeline = None

    def _run(
        self, given: Given, losses: list[Any] | None, return_outputs: bool, *, backward: bool
    ) -> Any:
        first = any(stage.is_first for stage in self._stages)
        last = any(stage.is_last for stage in self._stages)

        def batch() -> Microbatches:
            _require_call(
                backward=backward,
                losses=losses,
                no_loss="loss_fn" if self._loss is None else "" if given.has_target else "target",
                last=last,
            )
            return cut(
                given,
                self._n_microbatches,
                first=first,
                last=last and self._loss is not None,
                args_chunk_spec=self._args_chunk_spec,
                kwargs_chunk_spec=self._kwargs_chunk_spec,
            )

        run = self.pipeline.step if backward else self.pipeline.evaluate
        result = run(batch, outputs=return_outputs)
        if not last:
            return None
        if losses is not None:
            losses[:] = result.losses
        return merge_outputs(result.outputs, self._output_merge_spec) if return_outputs else None


class PipelineScheduleSingle(_PipelineSchedule):
    """Schedules of one stage a rank."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
    ) -> None:
        """loss_fn: (output, target, **loss_kwargs) -> scalar of one microbatch; None: no backward.

        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: see torch's TensorChunkSpec.
        scale_grads: for a loss_fn that gives a mean: gradients are those of the mean over the
            batch. False: those of the sum of what loss_fn gives.
        """
        super().__init__(
            [stage],
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )


class PipelineScheduleMulti(_PipelineSchedule):
    """Schedules of several stages a rank."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        """As PipelineScheduleSingle, with this rank's stages by index.

        defer_pp_recv: taken, and not needed: receives are posted a bounded depth ahead.
        """
        del defer_pp_recv
        if not backward_requires_autograd:
            raise ConfigError(
                "backwards are autograd's",
                "backward_requires_autograd is False",
                "leave it out",
            )
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )


def _nothing() -> None:
    pass


def _closed_at_exit(pipeline: Pipeline) -> Callable[[], None]:
    """What closes it, at the latest when the script ends. The ranks that go on are told of the
    exception that ends it, if any."""

    def close() -> None:
        atexit.unregister(close)
        error = getattr(sys, "last_value", None)
        pipeline.__exit__(None if error is None else type(error), error, None)

    atexit.register(close)  # the last to be registered, before what the pipeline has is closed
    return close


def _loss(loss_fn: Callable[..., Any] | None, scale_grads: bool) -> Loss | None:
    if loss_fn is None:
        return None

    def function(output: Any, told: Target) -> Any:
        target, keywords = told
        return loss_fn(output, target, **keywords)

    checked: LossFunction = function
    return MeanLoss(checked) if scale_grads else SumLoss(checked)


def _require_stages(stages: Sequence[PipelineStage]) -> None:
    is_list = isinstance(stages, Sequence) and len(stages) > 0
    if not is_list or not all(isinstance(stage, PipelineStage) for stage in stages):
        raise ConfigError(
            "a schedule runs stages of npu_pipe.torch_api: one, or a list for several a rank",
            f"it was given {stages!r:.80}",
            "build them with npu_pipe.torch_api.PipelineStage",
        )
    sizes = sorted({stage.num_stages for stage in stages})
    if len(sizes) > 1:
        raise ConfigError(
            "all stages know the same number of stages",
            f"num_stages is {' and '.join(map(str, sizes))}",
            "give each stage the number of all",
        )
    indices = [stage.stage_index for stage in stages]
    if len(set(indices)) < len(indices):
        raise ConfigError(
            "the stages of a rank differ", f"their indices are {indices}", "number them apart"
        )


def _require_call(*, backward: bool, losses: Any, no_loss: str, last: bool) -> None:
    """no_loss: what is missing for a loss, if anything."""
    if backward and not torch.is_grad_enabled():
        raise ConfigError(
            "step computes gradients",
            "it was called where they are disabled (torch.no_grad)",
            "call eval there",
        )
    if losses is not None and not isinstance(losses, list):
        raise DataError(
            "losses is a list to be filled", f"it is a {type(losses).__name__}", "give a list"
        )
    if last and no_loss and (backward or losses is not None):
        raise DataError(
            "a loss is of an output and a target, on the rank of the last stage",
            f"there is no {no_loss}",
            f"give {no_loss}{'' if backward else ', or no losses'}",
        )
