"""A rank as a user writes it: it names no launcher, and makes no process group by hand."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import npu_pipe

world = npu_pipe.World.from_environment()  # before torch: msrun's scheduler leaves here

mode = sys.argv[1]
if mode == "build":
    Path(f"ready{world.rank}").write_text(str(os.getpid()))
    time.sleep(600)  # a large model

import torch  # noqa: E402

schedule = npu_pipe.build_schedule("1f1b", ranks=world.size, microbatches=4)
torch.manual_seed(world.rank)
batch = torch.ones(8, 4), torch.zeros(8, 4)
loss = npu_pipe.MeanLoss(torch.nn.functional.mse_loss)
with npu_pipe.Pipeline(
    {world.rank: torch.nn.Linear(4, 4)}, schedule=schedule, loss=loss, world=world, timeout_s=20
) as pipe:
    value = pipe.step(batch).loss
    Path(f"ready{world.rank}").write_text(str(os.getpid()))
    if mode == "raise" and world.rank == world.size - 1:
        raise ValueError("no such layer")
    while mode != "step":
        pipe.step(batch)
# Into a file of its own: a launcher may join the lines of two ranks, or lose the last ones.
started = f"rank {world.rank} of {world.size} by {world.launcher.value}"
Path(f"said {started}").write_text(f"{started}: {value:.6f}")
