"""Cuda: NVIDIA through torch itself, with NCCL."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npu_pipe.device.accelerator import Accelerator, time_out
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.device.trace import torch_profile
from npu_pipe.errors import ConfigError

__all__ = ["Cuda", "why_no_cuda"]


def why_no_cuda() -> ConfigError | None:
    """What is missing to use a CUDA device; None if nothing is."""
    rule = "a CUDA device is used through a CUDA build of torch, and its driver"
    if torch.version.cuda is None:
        return ConfigError(
            rule,
            f"torch {torch.__version__} is built without CUDA",
            "install a CUDA build of torch, or compute on the CPU",
        )
    if torch.cuda.device_count() == 0:
        return ConfigError(
            rule,
            "torch finds no CUDA device",
            "look at nvidia-smi and at CUDA_VISIBLE_DEVICES, or compute on the CPU",
        )
    return None


class Cuda(Accelerator):
    """See `Device`, which this is. Raises ConfigError where device `index` cannot be used."""

    backend = "nccl"
    widest = torch.float64
    allocator_variable = "PYTORCH_CUDA_ALLOC_CONF"

    def __init__(self, index: int) -> None:
        missing = why_no_cuda()
        if missing is not None:
            raise missing
        count = torch.cuda.device_count()
        if index >= count:
            raise ConfigError(
                "each rank of a host has a CUDA device of its own",
                f"this is local rank {index}, and {count} CUDA devices are visible",
                "start fewer ranks, or look at CUDA_VISIBLE_DEVICES",
            )
        super().__init__(torch.device("cuda", index), torch.cuda)

    def profile(self, folder: Path, *, name: str) -> AbstractContextManager[object]:
        kinds = torch.profiler.ProfilerActivity
        return torch_profile((kinds.CPU, kinds.CUDA), folder / f"{name}.json")

    def add_backend(
        self, group: dist.ProcessGroup, store: dist.Store, *, name: str, options: LaneOptions
    ) -> None:
        if options.buffer_mb is not None:
            os.environ["NCCL_BUFFSIZE"] = str(options.buffer_mb << 20)
        nccl: Any = dist.ProcessGroupNCCL
        chosen = nccl.Options()
        chosen._timeout = time_out(options)
        chosen.global_ranks_in_group = list(range(group.size()))
        chosen.group_name = name
        if options.traffic_class is not None:
            chosen.config.traffic_class = options.traffic_class
        backend = nccl(store, group.rank(), group.size(), chosen)
        group._register_backend(self.place, dist.ProcessGroup.BackendType.NCCL, backend)

    def abort(self, group: dist.ProcessGroup) -> None:
        backend: Any = group._get_backend(self.place)
        backend.abort()
