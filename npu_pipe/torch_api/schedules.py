"""The schedules by torch's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from npu_pipe.errors import ConfigError
from npu_pipe.torch_api.schedule import PipelineSchedule
from npu_pipe.torch_api.stage import PipelineStage

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
]


class PipelineScheduleSingle(PipelineSchedule):
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


class PipelineScheduleMulti(PipelineSchedule):
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


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    family = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward and one backward in turn; any number of microbatches."""

    family = "1f1b"


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """1F1B with several stages a rank: stage s on rank s modulo ranks."""

    family = "interleaved-1f1b"


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """GPipe with several stages a rank: stage s on rank s modulo ranks."""

    family = "looped-bfs"

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        """torch's class takes no chunk specs."""
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    """Interleaved 1F1B with the backward split: W fills bubbles."""

    family = "interleaved-zb"


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    """ZB-V: two stages a rank in a V: stages r and 2 * ranks - 1 - r on rank r."""

    family = "zb-v"


class ScheduleDualPipeV(PipelineScheduleMulti):
    """DualPipe in a V, placed as ZB-V; at least two microbatches a rank."""

    family = "dualpipe-v"


_NAMES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "GPipe": ScheduleGPipe,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def get_schedule_class(
    schedule_name: str,
) -> type[PipelineScheduleSingle] | type[PipelineScheduleMulti]:
    """The class of a name, in upper or lower case. Raises ConfigError, which is a ValueError."""
    found = [c for name, c in _NAMES.items() if name.lower() == schedule_name.lower()]
    if not found:
        raise ConfigError(
            f"schedules are {', '.join(_NAMES)}", f"{schedule_name!r} was asked for", "take one"
        )
    return found[0]
