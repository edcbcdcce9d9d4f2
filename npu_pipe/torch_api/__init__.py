"""The names and semantics of torch.distributed.pipelining over this runtime.

    from npu_pipe.torch_api import PipelineStage, Schedule1F1B

    stage = PipelineStage(module, stage_index=rank, num_stages=world_size, device=device)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
    schedule.step(inputs) if rank == 0 else schedule.step(target=targets, losses=losses)

What is the same and what differs stands in docs/torch_api.md. Importing this imports torch.
"""

from __future__ import annotations

from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)

from npu_pipe.torch_api.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from npu_pipe.torch_api.schedules import _ScheduleForwardOnly as _ScheduleForwardOnly
from npu_pipe.torch_api.stage import PipelineStage

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "TensorChunkSpec",
    "get_schedule_class",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
]
