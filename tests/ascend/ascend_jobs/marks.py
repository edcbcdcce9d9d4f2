"""Jobs that are profiled by torch_npu, and read what came of it in the emulator's trace."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from jobs.on_device import WIDTH, stage
from torch import nn

from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.device.npu import Npu
from npu_pipe.ir.action import flatten


def step(world: World, *, name: str, microbatches: int, folder: str) -> dict[str, Any]:
    """The marks of three steps, the second of which is profiled."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    device = Npu(world.rank)
    mine = {i: stage(i).to(device.place) for i in schedule.stages_of(world.rank)}
    batch = tuple(torch.ones(2 * microbatches, WIDTH, device=device.place) for _ in range(2))
    counts = [len(_marks())]
    with Pipeline(
        mine, schedule=schedule, loss=MeanLoss(nn.functional.mse_loss), world=world
    ) as pipe:
        pipe.step(batch)
        counts.append(len(_marks()))
        with device.profile(Path(folder), name=f"rank-{world.rank}"):
            pipe.step(batch)
        device.synchronize()
        found = _marks()[counts[-1] :]
        before = len(_marks())
        pipe.step(batch)
        counts.append(len(_marks()) - before + counts[-1])
        timeline = pipe.timeline()
    return {
        "outside": counts[-1] - counts[0],
        "marks": found,
        "stream": torch.npu.current_stream().npu_stream,
        "wanted": [str(a) for each in schedule.orders[world.rank] for a in flatten(each)],
        "measured": [str(s.action) for s in timeline.compute if s.rank == world.rank],
    }


def _marks() -> list[dict[str, Any]]:
    path = Path(os.environ["NPU_EMU_TRACE_DIR"]) / f"marks{os.environ['RANK']}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
