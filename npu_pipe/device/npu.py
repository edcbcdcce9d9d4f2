"""Npu: Ascend through torch_npu, with HCCL.

This is the only file that imports torch_npu. It pairs with torch by the first two numbers of the
version, and needs CANN: without it, the import itself fails.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npu_pipe.device.accelerator import Accelerator, time_out
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.errors import ConfigError
from npu_pipe.ir.action import Action, Kind

__all__ = ["Npu", "hccl_config", "why_no_npu"]

_DISTRIBUTION = "torch-npu"
_NAME_LENGTH = 32  # of a communicator
# Words that msprof-analyze's pp_chart looks for in the message of a range; see `_message`.
_CHARTED = {
    Kind.F: "forward_step",
    Kind.B: "backward_step",
    Kind.I: "backward_step",
    Kind.W: "WeightGradStore_pop",
}
# Else torch_npu ends the process as soon as a peer is lost, before we can say which, and why.
_LET_LIVE = ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "0")


def why_no_npu() -> ConfigError | None:
    """What is missing to use an NPU; None if nothing is. Imports torch_npu if it may work."""
    rule = "an NPU is used through torch_npu of torch's own version, and CANN"
    try:
        found = version(_DISTRIBUTION)
    except PackageNotFoundError:
        return ConfigError(
            rule,
            "torch_npu is not installed",
            f"pip install 'torch-npu=={_minor(torch.__version__)}.*', or compute on the CPU",
        )
    if _minor(found) != _minor(torch.__version__):
        return ConfigError(
            rule,
            f"torch is {torch.__version__} and torch_npu is {found}",
            f"pip install 'torch-npu=={_minor(torch.__version__)}.*', or compute on the CPU",
        )
    try:
        module = _torch_npu()
    except Exception as error:  # it raises whatever it likes where something is missing
        return ConfigError(
            rule,
            f"torch_npu {found} does not load: {_first_line(error)}",
            "install CANN and source its set_env.sh, or compute on the CPU",
        )
    if module.npu.device_count() == 0:
        return ConfigError(
            rule,
            "torch_npu loads, and finds no NPU",
            "look at npu-smi info and at ASCEND_RT_VISIBLE_DEVICES, or compute on the CPU",
        )
    return None


class Npu(Accelerator):
    """See `Device`, which this is. Raises ConfigError where NPU number `index` cannot be used."""

    backend = "hccl"
    widest = torch.float32  # a matrix product of doubles is refused
    allocator_variable = "PYTORCH_NPU_ALLOC_CONF"

    def __init__(self, index: int) -> None:
        missing = why_no_npu()
        if missing is not None:
            raise missing
        self._module = _torch_npu()
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

    def profile(self, folder: Path, *, name: str) -> AbstractContextManager[object]:
        """Raw, as torch_npu.profiler.profiler.analyse takes it: that can take minutes."""
        profiler = self._module.profiler
        folder.mkdir(parents=True, exist_ok=True)
        kinds = profiler.ProfilerActivity
        taken: AbstractContextManager[object] = profiler.profile(
            activities=[kinds.CPU, kinds.NPU],
            experimental_config=profiler._ExperimentalConfig(
                mstx=True,
                export_type=[profiler.ExportType.Db],
                profiler_level=profiler.ProfilerLevel.Level1,
            ),
            on_trace_ready=profiler.tensorboard_trace_handler(
                str(folder), worker_name=name, analyse_flag=False
            ),
        )
        return taken

    def add_backend(
        self, group: dist.ProcessGroup, store: dist.Store, *, name: str, options: LaneOptions
    ) -> None:
        os.environ.setdefault(*_LET_LIVE)
        if options.buffer_mb is not None:  # no option of a group reaches its pairs of ranks
            os.environ["P2P_HCCL_BUFFSIZE"] = str(options.buffer_mb)
        hccl = self._module._C._distributed_c10d.ProcessGroupHCCL
        chosen = hccl.Options()
        chosen._timeout = time_out(options)
        chosen.global_ranks_in_group = list(range(group.size()))
        chosen.group_id = name
        chosen.hccl_config = hccl_config(name, options)
        backend = hccl(store, group.rank(), group.size(), chosen)
        group._register_backend(self.place, dist.ProcessGroup.BackendType.CUSTOM, backend)

    def abort(self, group: dist.ProcessGroup) -> None:
        backend: Any = group._get_backend(self.place)
        backend.abort_hccl_comm("another rank has failed")


def hccl_config(name: str, options: LaneOptions) -> dict[str, int | str]:
    """What HCCL is told, in its own words; see torch_npu's pg_options."""
    given: dict[str, int | str | None] = {
        "group_name": name[:_NAME_LENGTH],
        "qos_traffic_class": options.traffic_class,
        "qos_service_level": options.service_level,
        "hccl_op_expansion_mode": options.expansion_mode,
        "hccl_exec_timeout": options.transfer_s,
    }
    return {key: value for key, value in given.items() if value is not None}


def _message(action: Action) -> str:
    """The form that pp_chart's manual asks for, with the action's text besides."""
    message = {"name": _CHARTED[action.kind], "current_microbatch": action.microbatch}
    return str(message | {"action": str(action)})


def _torch_npu() -> Any:
    return importlib.import_module("torch_npu")


def _minor(text: str) -> str:
    return ".".join(text.split("+")[0].split(".")[:2])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
