"""The schedules by torch's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from npu_pipe.errors import ConfigError, ScheduleError
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.registry import build_schedule
from npu_pipe.torch_api.files import Form, read_order, write_order
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

_PipelineSchedule = PipelineSchedule  # torch's name for the base of all


class _Named(PipelineSchedule):
    """Schedules of `npu_pipe.build_schedule`. family: their name there."""

    family: str

    def _built(self, stages: Sequence[PipelineStage], microbatches: int) -> Schedule:
        first = stages[0]
        if first.num_stages != len(stages) * first.group_size:
            raise ConfigError(
                "each rank holds the same number of stages",
                f"{len(stages)} of {first.num_stages} stages were given on each of "
                f"{first.group_size} ranks",
                f"give stages of a model of {len(stages) * first.group_size}",
            )
        return build_schedule(
            self.family, ranks=first.group_size, microbatches=microbatches, chunks=len(stages)
        )


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
        """loss_fn: (output, target, **loss_kwargs) of one microbatch -> one element; None: no
            backward.

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
    """Schedules of any number of stages a rank; by itself, that of a file: see `_load_csv`."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
    ) -> None:
        """As PipelineScheduleSingle, with this rank's stages by index. use_full_backward: has no
        effect in torch either."""
        del use_full_backward
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

    def _built(self, stages: Sequence[PipelineStage], microbatches: int) -> Schedule | None:
        del stages, microbatches
        return None

    def _load_csv(self, filename: str, format: Form = "compute_only") -> None:  # noqa: A002
        """Run the schedule of a file in torch's form. The transfers of a "compute_comms" file are
        proved, and then placed as in any other schedule.

        Raises ScheduleError, a ValueError, for one that is wrong or not of these stages.
        """
        order = read_order(filename, form=format)
        first = self._stages[0]
        wanted = (first.group_size, first.num_stages, self._n_microbatches)
        if (order.ranks, order.stages, order.microbatches) != wanted:
            raise ScheduleError(
                "a file has the ranks, stages and microbatches of what is to run it",
                f"it has {order.ranks}, {order.stages} and {order.microbatches}, "
                f"not {', '.join(map(str, wanted[:2]))} and {wanted[2]}",
                "write it for these",
            )
        self.close()
        self._order = order

    def _dump_csv(self, filename: str) -> None:
        """Write the schedule in torch's form, compute only."""
        write_order(self.schedule, filename, form="compute_only")


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """The same; what it writes has transfers too, as in torch."""

    def __init__(self, *args: Any, defer_pp_recv: bool = False, **kwargs: Any) -> None:
        """defer_pp_recv: taken, and not needed: receives are posted a bounded depth ahead."""
        del defer_pp_recv
        super().__init__(*args, **kwargs)

    def _dump_csv(self, filename: str, format: Form = "compute_comms") -> None:  # noqa: A002
        """Write the schedule in torch's form, with or without transfers."""
        write_order(self.schedule, filename, form=format)


class _Several(_Named, _PipelineScheduleRuntime):
    """Schedules of several stages a rank that have a name."""

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
        """As PipelineScheduleMulti."""
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )


class _ScheduleForwardOnly(_Named, PipelineScheduleSingle):
    """Forwards only: `step` is `eval`, and gives outputs."""

    family = "gpipe"

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
        """loss_fn: taken, and not called, as in torch."""
        del loss_fn
        super().__init__(
            stage,
            n_microbatches,
            None,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
        )


class ScheduleGPipe(_Named, PipelineScheduleSingle):
    """All forwards, then all backwards."""

    family = "gpipe"


class Schedule1F1B(_Named, PipelineScheduleSingle):
    """One forward and one backward in turn; any number of microbatches."""

    family = "1f1b"


class ScheduleInterleaved1F1B(_Several):
    """1F1B with several stages a rank: stage s on rank s modulo ranks."""

    family = "interleaved-1f1b"


class ScheduleLoopedBFS(_Several):
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


class ScheduleInterleavedZeroBubble(_Several):
    """Interleaved 1F1B with the backward split: W fills bubbles."""

    family = "interleaved-zb"


class ScheduleZBVZeroBubble(_Several):
    """ZB-V: two stages a rank in a V: stages r and 2 * ranks - 1 - r on rank r."""

    family = "zb-v"


class ScheduleDualPipeV(_Several):
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
