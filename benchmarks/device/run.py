"""How a pipeline runs on the devices of this machine: steps measured against their prediction.

Ranks train blocks of the GPT that comes with npu_pipe. `ours` is the makespan of a measured window,
`peer` the one that is simulated with the times of the same window: what a schedule loses beside
its own bubble. Ranks that have no device of their own share one, through the host's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm.links import link_for, staged_link
from npu_pipe.device.choose import KINDS, choose
from npu_pipe.device.device import Device
from npu_pipe.errors import ConfigError
from npu_pipe.launch.guard import guard
from npu_pipe.launch.local import run_local
from npu_pipe.launch.world import Launcher
from npu_pipe.train.model import Block
from npu_pipe.train.model_config import ModelConfig
from npu_pipe.train.report import predict

RANKS, MICROBATCHES = 2, 8
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-v")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="a coarse answer in under a minute")
    parser.add_argument("--device", choices=KINDS, default="auto")
    parser.add_argument("--shared", action="store_true", help="all ranks on the first device")
    flags = parser.parse_args()
    world = World.from_environment()
    if world.launcher is Launcher.ONE_PROCESS:
        os.environ["OMP_NUM_THREADS"] = "1"
        return run_local([sys.executable, __file__, *sys.argv[1:]], ranks=RANKS)
    with guard(world):
        device, is_shared, why = pick(flags.device, world, shared=flags.shared)
        device.select()
        is_cpu = device.place.type == "cpu"
        size = (64, 2, 32) if is_cpu or flags.quick else (1024, 8, 512)
        cases = [
            measure(name, world, device, is_shared=is_shared, size=size, quick=flags.quick)
            for name in SCHEDULES
        ]
        if world.rank == 0:
            report(cases, f"{device.place.type} ({why}){', shared' * is_shared}", flags.json)
    return 0


def pick(wanted: str, world: World, *, shared: bool) -> tuple[Device, bool, str]:
    """The rank's own device; or the first, if it is to be shared, or there are fewer devices than
    ranks. Alike on all."""
    try:
        choose(wanted, index=world.size - 1)
    except ConfigError:
        shared = True
    if shared:
        device, why = choose(wanted, index=0)
        return device, True, why
    device, why = choose(wanted, index=world.local_rank)
    return device, False, why


def measure(
    name: str,
    world: World,
    device: Device,
    *,
    is_shared: bool,
    size: tuple[int, int, int],
    quick: bool,
) -> dict[str, object]:
    """size: width, rows of a microbatch, and length."""
    dim, rows, length = size
    schedule = build_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
    config = ModelConfig(dim=dim, heads=dim // 32, hidden=4 * dim)
    stages: dict[int, nn.Module] = {
        stage: nn.Sequential(*(Block(config) for _ in range(4 * RANKS // schedule.stages)))
        for stage in schedule.stages_of(world.rank)
    }
    for module in stages.values():
        module.to(device.place)
    shape = (rows * MICROBATCHES, length, dim)
    batch = torch.randn(shape, device=device.place), torch.zeros(shape, device=device.place)
    ours, peer, steps_s = [], [], []
    with Pipeline(
        stages,
        schedule=schedule,
        loss=MeanLoss(_loss),
        world=world,
        link=staged_link(device, schedule=schedule)
        if is_shared
        else link_for(stages.values(), schedule=schedule),
        timeout_s=60,
    ) as pipe:
        for _ in range(4 if quick else 12):
            start_s = time.perf_counter()
            pipe.step(batch)
            steps_s.append(time.perf_counter() - start_s)
            timeline = pipe.timeline()
            ours.append(timeline.makespan)
            peer.append(predict(timeline).makespan)
    median_ours, median_peer = statistics.median(ours[2:]), statistics.median(peer[2:])
    return {
        "case": name,
        "ours": median_ours / 1e3,
        "peer": median_peer / 1e3,
        "unit": "ms a step",
        "ratio": median_ours / median_peer,
        "step_ms": statistics.median(steps_s[2:]) * 1e3,
        "bubble": timeline.bubble_ratio,
        "highest_mb": device.memory().highest / 1e6,
    }


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def report(cases: list[dict[str, object]], device: str, path: Path | None) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {RANKS} ranks on {device}"
    print(f"{machine}, torch {torch.__version__}")
    for case in cases:
        print(
            "{case:18} step {step_ms:8.1f} ms  window {ours:8.1f} ms  predicted {peer:8.1f} ms  "
            "ratio {ratio:.3f}  bubble {bubble:5.1%}  rank 0 at most {highest_mb:7.0f} MB".format(
                **case
            )
        )
    if path is not None:
        result = {"name": "device", "machine": machine, "cases": cases}
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
