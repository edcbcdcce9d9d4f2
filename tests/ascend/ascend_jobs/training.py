"""Jobs that train on device npu, and compare with the unsplit model on the CPU."""

from __future__ import annotations

from functools import partial

from jobs import on_device

from npu_pipe import World
from npu_pipe.device.npu import Npu

equals_cpu = partial(on_device.equals_cpu, kind="npu")
tied_equals_cpu = partial(on_device.tied_equals_cpu, kind="npu")


def has_npu(world: World, *, index: int) -> None:
    Npu(index)
