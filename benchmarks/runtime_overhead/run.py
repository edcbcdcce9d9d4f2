"""Microseconds per action of the runtime itself: two ranks, layers too small to matter.

Ours and torch.distributed.pipelining run the same stages in turn in one run, over gloo; a case is
the median over its steps of (time of a step) / (actions of a rank in it).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm.links import OpenLink, fastest_link, gloo_link
from npu_pipe.launch.guard import guard
from npu_pipe.launch.local import run_local
from npu_pipe.launch.world import Launcher

RANKS, MICROBATCHES, WIDTH = 2, 128, 8
PEERS = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="a coarse answer in under a minute")
    parser.add_argument("--gloo", action="store_true", help="ours over gloo too")
    flags = parser.parse_args()
    world = World.from_environment()
    if world.launcher is Launcher.ONE_PROCESS:
        command = [sys.executable, __file__, *sys.argv[1:]]
        return run_local(command, ranks=RANKS)
    with guard(world):
        link = gloo_link if flags.gloo else fastest_link
        steps = 5 if flags.quick else 25
        cases = [measure(name, world, steps=steps, link=link) for name in PEERS]
        if world.rank == 0:
            report(cases, flags.json)
    return 0


def measure(name: str, world: World, *, steps: int, link: OpenLink) -> dict[str, object]:
    schedule = build_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
    actions = max(len(order) for order in schedule.orders)
    inputs = torch.randn(MICROBATCHES, WIDTH)
    loss = nn.functional.mse_loss
    ours_modules = {s: nn.Linear(WIDTH, WIDTH) for s in schedule.stages_of(world.rank)}
    pipe = Pipeline(ours_modules, schedule=schedule, loss=MeanLoss(loss), world=world, link=link)
    theirs = peer(name, schedule.stages, schedule.stages_of(world.rank))
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: pipe.step((inputs, inputs)),
        "peer": lambda: theirs(inputs),
    }
    for step in range(steps + 2):
        for side, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            if step >= 2:  # the first ones learn shapes
                times[side].append((time.perf_counter() - start) * 1e6 / actions)
    pipe.close()
    ours, other = (statistics.median(times[side]) for side in ("ours", "peer"))
    return {"case": name, "ours": ours, "peer": other, "unit": "us/action", "ratio": ours / other}


def peer(name: str, stages: int, mine: tuple[int, ...]) -> Callable[[torch.Tensor], object]:
    built = [
        pipelining.PipelineStage(nn.Linear(WIDTH, WIDTH), s, stages, torch.device("cpu"))
        for s in mine
    ]
    loss = nn.functional.mse_loss
    kind = PEERS[name]
    single = name in ("1f1b", "gpipe")
    schedule = kind(built[0] if single else built, MICROBATCHES, loss_fn=loss)

    def step(inputs: torch.Tensor) -> object:
        arguments = (inputs,) if 0 in mine else ()
        last = {"target": inputs, "losses": []} if stages - 1 in mine else {}
        return schedule.step(*arguments, **last)

    return step


def report(cases: list[dict[str, object]], path: Path | None) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    result = {"name": "runtime_overhead", "machine": machine, "cases": cases}
    print(f"{machine}, torch {torch.__version__}")
    for case in cases:
        print(
            "{case:18} ours {ours:7.1f}  torch {peer:7.1f} us/action  ratio {ratio:.2f}".format(
                **case
            )
        )
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
