"""How much of the transfer time that can hide behind compute does hide.

Four ranks whose stages sleep; the wire between them has a latency and a bandwidth. `ours` is the
transfer time hidden in a measured window over what the simulation of the same program hides; both
are counted by `npu_pipe.timeline.usage`. A sleep never lasts as long as it was told to, so the
simulation plays the window again with the times that its steps took; `of_plan` is the share of
what hides when each takes exactly its 5 or 10 ms. `peer` is 1: all that can hide.
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
from typing import Any

import torch
from torch import Tensor, nn

from npu_pipe import Costs, MeanLoss, Pipeline, World, build_schedule, lower, simulate
from npu_pipe.comm.links import paced
from npu_pipe.comm.shared import Pace
from npu_pipe.launch.guard import guard
from npu_pipe.launch.local import run_local
from npu_pipe.launch.world import Launcher
from npu_pipe.simulator.program import replay_program
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.timeline.usage import usage

RANKS, MICROBATCHES, FLOATS = 4, 16, 1 << 16
FORWARD_MS, BACKWARD_MS = 5.0, 10.0
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-v")
WIRES = {  # what a boundary of 256 KB takes
    "latency 1 ms": Pace(latency_us=1000, bytes_per_us=1e6),
    "bandwidth 2 ms": Pace(latency_us=100, bytes_per_us=FLOATS * 4 / 2000),
}


def sleep(duration_ms: float) -> None:
    """A sleep alone lasts up to 0.1 ms longer than asked."""
    end_s = time.perf_counter() + duration_ms / 1e3
    time.sleep(max(0.0, duration_ms / 1e3 - 2e-4))
    while time.perf_counter() < end_s:
        pass


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        sleep(forward_ms)
        ctx.backward_ms = backward_ms
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sleep(ctx.backward_ms)
        return gradients[0], None, None


class Sleeper(nn.Module):
    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.start = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x = x + self.start
        return Sleep.apply(x, FORWARD_MS / self.chunks, BACKWARD_MS / self.chunks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="a coarse answer in under a minute")
    flags = parser.parse_args()
    world = World.from_environment()
    if world.launcher is Launcher.ONE_PROCESS:
        os.environ["OMP_NUM_THREADS"] = "1"
        return run_local([sys.executable, __file__, *sys.argv[1:]], ranks=RANKS)
    with guard(world):
        torch.set_num_threads(1)
        steps = 3 if flags.quick else 9
        cases = [measure(name, wire, world, steps=steps) for wire in WIRES for name in SCHEDULES]
        if world.rank == 0:
            report(cases, flags.json)
    return 0


def hidden(timeline: Timeline) -> tuple[float, float]:
    """Of all transfers, the time hidden and the time exposed."""
    uses = usage(timeline)
    return sum(use.hidden_us for use in uses), sum(use.exposed_us for use in uses)


def measure(name: str, wire: str, world: World, *, steps: int) -> dict[str, object]:
    schedule = build_schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
    chunks, pace = schedule.stages // RANKS, WIRES[wire]
    costs = Costs.uniform(
        schedule.stages,
        forward=FORWARD_MS / chunks * 1e3,
        input_grad=BACKWARD_MS / chunks * 1e3,  # all of it: nothing of a Sleeper waits for W
        weight_grad=0,
        transfer=pace.latency_us + FLOATS * 4 / pace.bytes_per_us,
    )
    program = lower(schedule, costs)
    could_hide, exposed = hidden(simulate(program, costs))
    modules: dict[int, nn.Module] = {s: Sleeper(chunks) for s in schedule.stages_of(world.rank)}
    batch = torch.zeros(MICROBATCHES, FLOATS), torch.zeros(MICROBATCHES, 1)
    hidden_us, shares, times = [], [], []
    with Pipeline(
        modules,
        schedule=schedule,
        loss=MeanLoss(lambda output, target: (output[:, :1] - target).square().mean()),
        world=world,
        costs=costs,
        link=paced(pace),
    ) as pipe:
        for _ in range(steps + 1):
            pipe.step(batch)
            timeline = pipe.timeline()
            replay = replay_program(program, timeline, costs)
            hidden_us.append(hidden(timeline)[0])
            shares.append(hidden_us[-1] / hidden(replay)[0])
            times.append(timeline.makespan / replay.makespan)
    share = statistics.median(shares[1:])
    return {
        "case": f"{name}, {wire}",
        "ours": share,
        "peer": 1.0,
        "unit": "hidden / can hide",
        "ratio": share,
        "can_hide_ms": could_hide / 1e3,
        "cannot_hide_ms": exposed / 1e3,
        "of_plan": statistics.median(hidden_us[1:]) / could_hide,
        "step_over_predicted": statistics.median(times[1:]),
    }


def report(cases: list[dict[str, object]], path: Path | None) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, torch {torch.__version__}")
    for case in cases:
        print(
            "{case:36} can hide {can_hide_ms:7.1f} ms (cannot {cannot_hide_ms:6.1f})  "
            "hidden {ours:6.1%} (of the plan {of_plan:6.1%})  "
            "step / predicted {step_over_predicted:.3f}".format(**case)
        )
    if path is not None:
        result = {"name": "overlap", "machine": machine, "cases": cases}
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
