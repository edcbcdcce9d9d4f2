"""Step time over the simulated ideal, with stages that sleep: what the runtime adds to a schedule.

Four ranks; a rank sleeps 5 ms for its forward and 10 ms for its backward of a microbatch, spread
evenly over its stages; a split backward sleeps half in each of its halves. Ours and
torch.distributed.pipelining run the same stages in turn in one run, over gloo.
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
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from by_hand import by_hand
from torch import Tensor, nn
from torch.distributed import pipelining

from npu_pipe import (
    Costs,
    MeanLoss,
    Pipeline,
    Schedule,
    Timeline,
    World,
    build_schedule,
    lower,
    simulate,
)
from npu_pipe.comm.links import OpenLink, fastest_link, gloo_link
from npu_pipe.launch.guard import guard
from npu_pipe.launch.local import run_local
from npu_pipe.launch.world import Launcher
from npu_pipe.simulator.program import replay_program
from npu_pipe.timeline.flight import flights

RANKS, FORWARD_MS, BACKWARD_MS = 4, 5.0, 10.0
WIDTH = 8
SIZES = {"32 B": 0, "4 MB": 1 << 20}  # floats beside the 8 of the layer
PEERS = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    # torch's own zb-v cannot split the backward of these stages (torch 2.13 raises RuntimeError):
    # what it runs instead of it has one stage a rank.
    "zb-v": pipelining.Schedule1F1B,
}


def sleep_until(end_s: float) -> None:
    """A sleep alone lasts up to 0.1 ms longer than asked, and its ends are not what is measured."""
    time.sleep(max(0.0, end_s - time.perf_counter() - 2e-4))
    while time.perf_counter() < end_s:
        pass


class Sleep(torch.autograd.Function):
    """The same value, in so many milliseconds each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end_s: float, module: Sleeper) -> Tensor:
        ctx.module = module
        y = x.view_as(x)
        sleep_until(end_s)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.module.ended_s = time.perf_counter() + ctx.module.half_ms / 1e3
        sleep_until(ctx.module.ended_s)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """Half of its backward is for the input; the other half is the gradient of a small weight.

    A boundary is what the layer gives; in a large one a large tensor passes by, so that there is
    next to nothing to compute.
    """

    def __init__(self, stages_a_rank: int, *, is_first: bool) -> None:
        super().__init__()
        # The batch needs no gradient, but what passes by shall have one from the first stage on.
        self.start = nn.Parameter(torch.zeros(1)) if is_first else None
        self.forward_ms = FORWARD_MS / stages_a_rank
        self.half_ms = BACKWARD_MS / stages_a_rank / 2
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layer.weight.register_hook(self.sleep)
        self.ended_s = 0.0

    def sleep(self, gradient: Tensor) -> Tensor:
        """The weight's half: at once after the input's in a whole backward, else in W."""
        now_s = time.perf_counter()
        start_s = self.ended_s if now_s - self.ended_s < 1e-3 else now_s
        sleep_until(start_s + self.half_ms / 1e3)
        return gradient

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        end_s = time.perf_counter() + self.forward_ms / 1e3
        x = self.layer(x)
        if not beside:
            return Sleep.apply(x, end_s, self)
        (large,) = beside
        if self.start is not None:
            large = large + self.start
        return x, Sleep.apply(large, end_s, self)


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
            report(cases, flags.json)
    return 0


def ideal_us(schedule: Schedule) -> float:
    chunks = schedule.stages // schedule.ranks
    half = BACKWARD_MS / chunks / 2 * 1e3
    forward = FORWARD_MS / chunks * 1e3
    costs = Costs.uniform(schedule.stages, forward=forward, input_grad=half, weight_grad=half)
    return simulate(schedule, costs).makespan


def predicted_us(measured: Timeline) -> float:
    """What the simulation says for the times that the actions and transfers really took."""
    schedule = measured.schedule
    transfer = fmean(flight.took_us for flight in flights(measured).values())
    costs = Costs.uniform(schedule.stages, transfer=transfer)
    return replay_program(lower(schedule, costs), measured, costs).makespan


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
    modules: dict[int, nn.Module] = {
        s: Sleeper(chunks, is_first=bool(beside) and s == 0) for s in mine
    }
    pipe = Pipeline(modules, schedule=schedule, loss=MeanLoss(loss), world=world, link=link)
    theirs = peer(name, schedule, mine, beside=bool(beside))
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: pipe.step((inputs, targets)),
        "peer": lambda: theirs(inputs, targets),
    }
    if chunks == 1 and not beside:
        bare = by_hand(schedule, Sleeper(1, is_first=False), loss)
        runs["by_hand"] = lambda: bare(inputs[0], targets)
    times: dict[str, list[float]] = {side: [] for side in runs}
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
    pipe.close()
    ideal = ideal_us(schedule)
    took = {side: statistics.median(times[side]) / ideal for side in runs}
    return {
        "case": f"{name} m={microbatches} {size}",
        **took,
        "unit": "step time / simulated ideal",
        "ratio": took["ours"] / took["peer"],
        "ideal_ms": ideal / 1e3,
        "measured_over_predicted": timeline.makespan / predicted_us(timeline),
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


def report(cases: list[dict[str, object]], path: Path | None) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, torch {torch.__version__}: step time / simulated ideal")
    for case in cases:
        line = (
            "{case:30} ideal {ideal_ms:6.1f} ms  ours {ours:5.3f}  torch {peer:5.3f}  {ratio:.2f}"
            "  measured / predicted {measured_over_predicted:.3f}"
        )
        bare = f"  by hand {case['by_hand']:5.3f}" if "by_hand" in case else ""
        print(line.format(**case) + bare)
    if path is not None:
        result = {"name": "bubble", "machine": machine, "cases": cases}
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
