"""Npu: Ascend through torch_npu, with HCCL.

This is the only file that imports torch_npu. It pairs with torch by the first two numbers of the
version, and needs CANN: without it, the import itself fails.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from npu_pipe.device.accelerator import Accelerator
from npu_pipe.device.device import LaneOptions
from npu_pipe.errors import ConfigError

__all__ = ["Npu", "hccl_config", "why_no_npu"]

_DISTRIBUTION = "torch-npu"
_NAME_LENGTH = 32  # of a communicator
_DOMAIN = "npu_pipe"
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
    """See `Device`, which this is. Raises ConfigError where NPU number `index` cannot be used.

    marks: also name ranges and moments for msprof; that needs the profiler of CANN.
    """

    backend = "hccl"
    allocator_variable = "PYTORCH_NPU_ALLOC_CONF"

    def __init__(self, index: int, *, marks: bool = False) -> None:
        missing = why_no_npu()
        if missing is not None:
            raise missing
        self._module = _torch_npu()
        self._marks = marks
        count = self._module.npu.device_count()
        if index >= count:
            raise ConfigError(
                "each rank of a host has an NPU of its own",
                f"this is local rank {index}, and {count} NPUs are visible",
                "start fewer ranks, or look at ASCEND_RT_VISIBLE_DEVICES",
            )
        super().__init__(torch.device("npu", index), self._module.npu)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        mstx = self._module.npu.mstx
        stream = self.current_stream() if self._marks else None
        number = mstx.range_start(name, stream, _DOMAIN) if self._marks else None
        try:
            with super().range(name):
                yield
        finally:
            if number is not None:
                mstx.range_end(number, _DOMAIN)

    def mark(self, name: str) -> None:
        if self._marks:
            self._module.npu.mstx.mark(name, self.current_stream(), _DOMAIN)

    def add_backend(
        self, group: dist.ProcessGroup, store: dist.Store, *, options: LaneOptions
    ) -> None:
        os.environ.setdefault(*_LET_LIVE)
        hccl = self._module._C._distributed_c10d.ProcessGroupHCCL
        chosen = hccl.Options()
        chosen._timeout = options.timeout
        chosen.global_ranks_in_group = list(range(group.size()))
        chosen.group_id = options.name
        chosen.hccl_config = hccl_config(options)
        backend = hccl(store, group.rank(), group.size(), chosen)
        group._register_backend(self.place, dist.ProcessGroup.BackendType.CUSTOM, backend)

    def abort(self, group: dist.ProcessGroup) -> None:
        backend: Any = group._get_backend(self.place)
        backend.abort_hccl_comm("another rank has failed")


def hccl_config(options: LaneOptions) -> dict[str, int | str]:
    """What HCCL is told, in its own words; see torch_npu's pg_options."""
    given: dict[str, int | str | None] = {
        "group_name": options.name[:_NAME_LENGTH],
        "hccl_buffer_size": options.buffer_mb,
        "qos_traffic_class": options.traffic_class,
        "qos_service_level": options.service_level,
        "hccl_op_expansion_mode": options.expansion_mode,
    }
    return {key: value for key, value in given.items() if value is not None}


def _torch_npu() -> Any:
    return importlib.import_module("torch_npu")


def _minor(text: str) -> str:
    return ".".join(text.split("+")[0].split(".")[:2])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
