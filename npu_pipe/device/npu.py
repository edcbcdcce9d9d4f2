"""Npu: Ascend through torch_npu, with HCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npu_pipe.device.accelerator import Accelerator, time_out
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.device.npu_package import torch_npu, why_no_npu
from npu_pipe.errors import ConfigError
from npu_pipe.ir.action import Action, Kind

__all__ = ["Npu", "hccl_variables"]

_MODES: Mapping[int, str | None] = {0: None, 1: "HOST", 2: "AI_CPU", 3: "AIV"}
# Words that msprof-analyze's pp_chart looks for in the message of a range; see `_message`.
_CHARTED = {
    Kind.F: "forward_step",
    Kind.B: "backward_step",
    Kind.I: "backward_step",
    Kind.W: "WeightGradStore_pop",
}
# Else torch_npu ends the process as soon as a peer is lost, before we can say which, and why.
_LET_LIVE = ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "0")


class Npu(Accelerator):
    """See `Device`, which this is. Raises ConfigError where NPU number `index` cannot be used."""

    backend = "hccl"
    widest = torch.float32  # torch_npu makes floats of doubles
    allocator_variable = "PYTORCH_NPU_ALLOC_CONF"

    def __init__(self, index: int) -> None:
        missing = why_no_npu()
        if missing is not None:
            raise missing
        self._module = torch_npu()
        count = self._module.npu.device_count()
        if index >= count:
            raise ConfigError(
                "each rank of a host has an NPU of its own",
                f"this is local rank {index}, and {count} NPUs are visible",
                "start fewer ranks, or look at ASCEND_RT_VISIBLE_DEVICES",
            )
        super().__init__(torch.device("npu", index), self._module.npu)

    def is_profiled(self) -> bool:
        """By torch's profiler, torch_npu's, or one that only listens to mstx, as msMonitor."""
        number = self._module.npu.mstx.range_start("npu_pipe")  # 0 where nobody listens
        self._module.npu.mstx.range_end(number)
        return bool(number) or super().is_profiled()

    @contextmanager
    def range(self, action: Action) -> Iterator[None]:
        """Under a stream, a range is a task of the device too, and that is what pp_chart draws."""
        mstx = self._module.npu.mstx
        with super().range(action):
            number = mstx.range_start(_message(action), self.current_stream())
            try:
                yield
            finally:
                mstx.range_end(number)

    @contextmanager
    def profile(self, folder: Path, *, name: str) -> Iterator[None]:
        """Raw, as torch_npu.profiler.profiler.analyse takes it: that can take minutes."""
        profiler = self._module.profiler
        folder.mkdir(parents=True, exist_ok=True)
        kinds = profiler.ProfilerActivity
        with profiler.profile(
            activities=[kinds.CPU, kinds.NPU],
            schedule=profiler.schedule(wait=0, warmup=0, active=1, repeat=1),
            experimental_config=profiler._ExperimentalConfig(
                mstx=True,
                export_type=[profiler.ExportType.Db],
                profiler_level=profiler.ProfilerLevel.Level1,
            ),
            on_trace_ready=profiler.tensorboard_trace_handler(
                str(folder), worker_name=name, analyse_flag=False
            ),
        ) as taken:
            yield
            taken.step()

    def select(self) -> None:
        os.environ.setdefault(*_LET_LIVE)  # before any group is made, by whomever
        super().select()

    def add_backend(
        self, group: dist.ProcessGroup, store: dist.Store, *, name: str, options: LaneOptions
    ) -> None:
        os.environ.setdefault(*_LET_LIVE)
        os.environ.update(hccl_variables(options))
        hccl = self._module._C._distributed_c10d.ProcessGroupHCCL
        chosen = hccl.Options()
        chosen._timeout = time_out(options)
        chosen.global_ranks_in_group = list(range(group.size()))
        chosen.group_id = name
        backend = hccl(store, group.rank(), group.size(), chosen)
        group._register_backend(self.place, dist.ProcessGroup.BackendType.CUSTOM, backend)

    def abort(self, group: dist.ProcessGroup) -> None:
        backend: Any = group._get_backend(self.place)
        backend.abort_hccl_comm("another rank has failed")


def hccl_variables(options: LaneOptions) -> dict[str, str]:
    """What HCCL reads from the environment when it makes a communicator.

    No option of a group reaches its communicators of two ranks, which transfers use.
    """
    mode = None if options.expansion_mode is None else _MODES[options.expansion_mode]
    given: dict[str, int | str | None] = {
        "P2P_HCCL_BUFFSIZE": options.buffer_mb,
        "HCCL_RDMA_TC": options.traffic_class,
        "HCCL_RDMA_SL": options.service_level,
        "HCCL_OP_EXPANSION_MODE": mode,
        "HCCL_EXEC_TIMEOUT": options.transfer_s,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _message(action: Action) -> str:
    """The form that pp_chart's manual asks for, with the action's text besides."""
    message = {"name": _CHARTED[action.kind], "current_microbatch": action.microbatch}
    return str(message | {"action": str(action)})
