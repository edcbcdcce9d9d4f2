"""What all schedules do: step, eval, and the Pipeline underneath."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npu_pipe.errors import ConfigError
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.users_group import group_timeout_s
from npu_pipe.pipeline import Microbatches, Pipeline
from npu_pipe.torch_api.checks import require_call, require_stages
from npu_pipe.torch_api.closing import closed_at_exit
from npu_pipe.torch_api.given import Given, Part, cut
from npu_pipe.torch_api.losses import loss_of
from npu_pipe.torch_api.outputs import merge_outputs
from npu_pipe.torch_api.stage import PipelineStage
from npu_pipe.torch_api.whole import pass_gradients

__all__ = ["PipelineSchedule"]


class PipelineSchedule(ABC):
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
        require_stages(stages)
        self._order = self._built(stages, n_microbatches)
        self.scale_grads = scale_grads
        self._stages = list(stages)
        self._n_microbatches = n_microbatches
        self._loss = loss_of(loss_fn, scale_grads=scale_grads)
        self._args_chunk_spec = args_chunk_spec
        self._kwargs_chunk_spec = kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self._pipeline: Pipeline | None = None
        self._closing: Callable[[], Any] = _nothing

    @abstractmethod
    def _built(self, stages: Sequence[PipelineStage], microbatches: int) -> Schedule | None:
        """The schedule, or None where it comes later."""

    @property
    def schedule(self) -> Schedule:
        """What is run."""
        if self._order is None:
            raise ConfigError(
                f"{type(self).__name__} runs the schedule of a file",
                "none has been read",
                "call _load_csv, or take another class",
            )
        return self._order

    @property
    def pipeline(self) -> Pipeline:
        """The Pipeline underneath, for what torch has no name for: `clip_gradients`, `timeline`.

        Made by the first call, and anew after a failure; that is collective.
        """
        if self._pipeline is None or not self._pipeline.is_open:
            self.close()
            # A script may let ranks wait while one saves a checkpoint, as long as torch lets it.
            patience_s = min(group_timeout_s(), 1e6)
            self._pipeline = Pipeline(
                {stage.stage_index: stage.submod for stage in self._stages},
                schedule=self.schedule,
                loss=self._loss,
                world=self._stages[0].world,
                timeout_s=patience_s,
                connect_s=patience_s,
            )
            # Scripts for torch have no word for the end.
            closing = weakref.finalize(self, closed_at_exit(self._pipeline))
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
        Of these, tensors that require gradients get them.
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
        """As `step`, forwards only and without gradients; the target may be left out, and a loss
        may have any form."""
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
        parts: list[Part] = []

        def batch() -> Microbatches:
            require_call(
                backward=backward,
                losses=losses,
                no_loss="loss_fn" if self._loss is None else "" if given.has_target else "target",
                last=last,
            )
            part = cut(
                given,
                self._n_microbatches,
                first=first,
                last=last and self._loss is not None,
                backward=backward,
                args_chunk_spec=self._args_chunk_spec,
                kwargs_chunk_spec=self._kwargs_chunk_spec,
            )
            parts.append(part)
            return part.microbatches

        if backward:
            result = self.pipeline.step(batch, outputs=return_outputs)
        else:  # without a loss, outputs are all that an evaluation is for
            rated = self._loss is not None and given.has_target
            result = self.pipeline.evaluate(batch, outputs=return_outputs or not rated)
        (part,) = parts
        pass_gradients(part.wholes)
        if not last:
            return None
        if losses is not None:
            losses[:] = [part.losses[index] for index in sorted(part.losses)]
        return merge_outputs(result.outputs, self._output_merge_spec) if return_outputs else None


def _nothing() -> None:
    pass
