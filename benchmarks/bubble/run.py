"""Step time over the simulated ideal, with stages that sleep: what the runtime adds to a schedule.

Four ranks; a rank sleeps 5 ms for its forward and 10 ms for its backward of a microbatch, spread
evenly over its stages; a split backward sleeps half in each of its halves. Ours,
torch.distributed.pipelining and a loop by hand run the same stages in turn in one run.
"""

from __future__ import annotations

import argparse
import gc
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
from by_hand import by_hand
from forecast import forecast_us
from sleeper import BACKWARD_MS, FORWARD_MS, WIDTH, Sleeper
from torch import Tensor, nn
from torch.distributed import pipelining

from npu_pipe import (
    Costs,
    MeanLoss,
    Pipeline,
    Schedule,
    World,
    build_schedule,
    simulate,
)
from npu_pipe.comm.links import OpenLink, fastest_link, gloo_link
from npu_pipe.launch.guard import guard
from npu_pipe.launch.local import run_local
from npu_pipe.launch.world import Launcher

RANKS = 4
SIZES = {"32 B": 0, "4 MB": 1 << 20}  # floats beside the 8 of the layer
PEERS = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    # torch's own zb-v cannot split the backward of these stages (torch 2.13 raises RuntimeError):
    # what it runs instead of it has one stage a rank.
    "zb-v": pipelining.Schedule1F1B,
}


def loss(output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Of little work, whatever the size."""
    if isinstance(output, Tensor):
        return nn.functional.mse_loss(output, target)
    x, large = output
    return nn.functional.mse_loss(x, target) + large[:, :1].mean()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="a coarse answer in under a minute")
    parser.add_argument("--gloo", action="store_true", help="ours over gloo too")
    flags = parser.parse_args()
    world = World.from_environment()
    if world.launcher is Launcher.ONE_PROCESS:
        os.environ["OMP_NUM_THREADS"] = "1"
        return run_local([sys.executable, __file__, *sys.argv[1:]], ranks=RANKS)
    with guard(world):
        torch.set_num_threads(1)
        counts = (8,) if flags.quick else (8, 32)
        cases = [
            measure(
                name,
                world,
                microbatches=m,
                size=size,
                steps=3 if flags.quick else 7,
                link=gloo_link if flags.gloo else fastest_link,
            )
            for size in SIZES
            for m in counts
            for name in PEERS
        ]
        if world.rank == 0:
            report(cases, [alone(chunks) for chunks in (1, 2)], flags.json)
    return 0


def ideal_us(schedule: Schedule) -> float:
    chunks = schedule.stages // schedule.ranks
    half = BACKWARD_MS / chunks / 2 * 1e3
    forward = FORWARD_MS / chunks * 1e3
    costs = Costs.uniform(schedule.stages, forward=forward, input_grad=half, weight_grad=half)
    return simulate(schedule, costs).makespan


def alone(chunks: int) -> float:
    """The forward and backward of one stage, with no pipeline, over the time that they sleep."""
    module = Sleeper(chunks, is_first=False)
    x = torch.randn(1, WIDTH)
    times = []
    for _ in range(30):
        start_s = time.perf_counter()
        y = module(x.requires_grad_())
        torch.autograd.backward([y], [torch.ones_like(y)])
        times.append(time.perf_counter() - start_s)
    return statistics.median(times) * 1e3 * chunks / (FORWARD_MS + BACKWARD_MS)


def measure(
    name: str, world: World, *, microbatches: int, size: str, steps: int, link: OpenLink
) -> dict[str, object]:
    schedule = build_schedule(name, ranks=RANKS, microbatches=microbatches)
    chunks = schedule.stages // RANKS
    mine = schedule.stages_of(world.rank)
    beside = SIZES[size]
    inputs: tuple[Tensor, ...] = (torch.randn(microbatches, WIDTH),)
    if beside:
        inputs += (torch.randn(microbatches, beside),)
    targets = torch.randn(microbatches, WIDTH)
    modules = {s: Sleeper(chunks, is_first=bool(beside) and s == 0) for s in mine}
    pipe = Pipeline(modules, schedule=schedule, loss=MeanLoss(loss), world=world, link=link)
    theirs = peer(name, schedule, mine, beside=bool(beside))
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: pipe.step((inputs, targets)),
        "peer": lambda: theirs(inputs, targets),
    }
    if not beside:
        bare = by_hand(schedule, {s: Sleeper(chunks, is_first=False) for s in mine}, loss)
        runs["by_hand"] = lambda: bare(inputs[0], targets)
    times: dict[str, list[float]] = {side: [] for side in runs}
    forecasts: list[float] = []  # each window over what the one before it says of the next
    expected_us = 0.0
    for step in range(steps + 1):
        for side, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            took_us = torch.tensor([(time.perf_counter() - start) * 1e6])
            dist.all_reduce(took_us, dist.ReduceOp.MAX)  # of the rank that took longest
            if step >= 1:  # the first one learns shapes
                times[side].append(float(took_us))
        timeline = pipe.timeline()
        if step >= 2:
            forecasts.append(timeline.makespan / expected_us)
        expected_us = forecast_us(timeline)
        del timeline
        gc.collect()  # of what the timeline took, before the next step
    pipe.close()
    ideal = ideal_us(schedule)
    took = {side: statistics.median(times[side]) / ideal for side in runs}
    return {
        "case": f"{name} m={microbatches} {size}",
        **took,
        "unit": "step time / simulated ideal",
        "ratio": took["ours"] / took["peer"],
        "ideal_ms": ideal / 1e3,
        "measured_over_predicted": statistics.median(forecasts),
    }


def peer(
    name: str, schedule: Schedule, mine: tuple[int, ...], *, beside: bool
) -> Callable[..., object]:
    single = PEERS[name] in (pipelining.Schedule1F1B, pipelining.ScheduleGPipe)
    stages = RANKS if single else schedule.stages
    chunks = stages // RANKS
    if single:
        mine = (dist.get_rank(),)
    built = [
        pipelining.PipelineStage(
            Sleeper(chunks, is_first=beside and s == 0), s, stages, torch.device("cpu")
        )
        for s in mine
    ]
    run = PEERS[name](built[0] if single else built, schedule.microbatches, loss_fn=loss)

    def step(inputs: tuple[Tensor, ...], targets: Tensor) -> object:
        arguments = inputs if 0 in mine else ()
        last = {"target": targets, "losses": []} if stages - 1 in mine else {}
        return run.step(*arguments, **last)

    return step


def report(cases: list[dict[str, object]], solo: list[float], path: Path | None) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, torch {torch.__version__}: step time / simulated ideal")
    print("a stage alone, over what it sleeps: whole {:.3f}, half {:.3f}".format(*solo))
    for case in cases:
        line = (
            "{case:30} ideal {ideal_ms:6.1f} ms  ours {ours:5.3f}  torch {peer:5.3f}  {ratio:.2f}"
            "  measured / predicted {measured_over_predicted:.3f}"
        )
        bare = f"  by hand {case['by_hand']:5.3f}" if "by_hand" in case else ""
        print(line.format(**case) + bare)
    if path is not None:
        result = {"name": "bubble", "machine": machine, "alone": solo, "cases": cases}
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
