"""Jobs that save and load the state of a device."""

from __future__ import annotations

from pathlib import Path

import torch
from jobs.on_device import stage

from npu_pipe import World
from npu_pipe.device.cpu import Cpu
from npu_pipe.device.device import Device
from npu_pipe.device.npu import Npu
from npu_pipe.train.adamw import build_adamw
from npu_pipe.train.checkpoint import RankState, load_checkpoint, save_checkpoint
from npu_pipe.train.manifest import latest, read_manifest
from npu_pipe.train.optimizer import OptimizerConfig


def random_numbers(world: World, *, folder: str) -> dict[str, list[list[float]]]:
    """What the generators of the NPU and of the host give after a checkpoint: the first time, after
    it was loaded, and after it was loaded where stages are on the CPU."""
    device = Npu(0)
    device.select()
    found: dict[str, list[list[float]]] = {}
    for seed, (name, used) in enumerate({"npu": device, "again": device, "cpu": Cpu()}.items()):
        torch.manual_seed(seed)
        torch.npu.manual_seed(seed)
        state = _state(used)
        if name == "npu":
            save_checkpoint(
                Path(folder), state, step=1, job={"run.seed": 0}, keep=1, gather=lambda mine: [mine]
            )
        else:
            checkpoint = latest(Path(folder))
            assert checkpoint is not None
            load_checkpoint(checkpoint, read_manifest(checkpoint), state)
        found[name] = [torch.rand(3, device=place).tolist() for place in ("npu", "cpu")]
    return found


def _state(device: Device) -> RankState:
    stages = {0: stage(0).to(device.place)}
    optimizer = build_adamw(OptimizerConfig(), stages.values())
    for parameter in stages[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return RankState(0, stages, optimizer, [0], device)
