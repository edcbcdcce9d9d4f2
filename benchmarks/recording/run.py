"""The share of a step that recording it takes.

A step is run and timed, over gloo; then its recorder's calls, as many and of the same kinds as
the step had on the busiest rank, are played again alone and timed: a difference between steps
with and without recording would be lost in their noise.
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
from torch import nn

from npu_pipe import Action, Kind, MeanLoss, Pipeline, Timeline, World, build_schedule
from npu_pipe.launch.guard import guard
from npu_pipe.launch.local import run_local
from npu_pipe.launch.world import Launcher
from npu_pipe.runtime.record import Recorder, now_us
from npu_pipe.timeline.phase import Phase

RANKS = 2
CASES = {  # schedule, microbatches, rows of one, width
    "1f1b, nothing to compute": ("1f1b", 128, 1, 8),
    "zb-v, nothing to compute": ("zb-v", 128, 1, 8),
    "1f1b, a millisecond an action": ("1f1b", 8, 64, 512),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="a coarse answer in seconds")
    flags = parser.parse_args()
    world = World.from_environment()
    if world.launcher is Launcher.ONE_PROCESS:
        return run_local([sys.executable, __file__, *sys.argv[1:]], ranks=RANKS)
    with guard(world):
        cases = [measure(case, world, steps=5 if flags.quick else 25) for case in CASES]
        if world.rank == 0:
            report(cases, flags.json)
    return 0


def measure(case: str, world: World, *, steps: int) -> dict[str, object]:
    name, microbatches, rows, width = CASES[case]
    schedule = build_schedule(name, ranks=RANKS, microbatches=microbatches)
    stages = {s: nn.Linear(width, width) for s in schedule.stages_of(world.rank)}
    inputs = torch.randn(microbatches * rows, width)
    loss = MeanLoss(nn.functional.mse_loss)
    with Pipeline(stages, schedule=schedule, loss=loss, world=world) as pipe:
        took = []
        for _ in range(steps + 2):
            pipe.gather(None)  # all begin together
            start_us = now_us()
            pipe.step((inputs, inputs))
            took.append(now_us() - start_us)
        timeline = pipe.timeline()
    step_us = statistics.median(took[2:])  # the first ones learn shapes
    recording_us = max(statistics.median(replays(timeline, rank)) for rank in range(RANKS))
    ratio = recording_us / step_us
    return {"case": case, "ours": recording_us, "peer": step_us, "unit": "us", "ratio": ratio}


def replays(timeline: Timeline, rank: int) -> list[float]:
    """Times of the calls that recorded this rank's part, nothing between them."""
    counts = [
        sum(span.rank == rank for span in spans)
        for spans in (timeline.compute, timeline.transfers, timeline.waits, timeline.phases)
    ]
    action = Action(Kind.F, 0, 0)
    found = []
    for _ in range(21):
        recorder = Recorder()
        start = time.perf_counter()
        for _ in range(counts[0]):
            recorder.add(action, recorder.begin(), now_us())
        for _ in range(counts[1]):
            recorder.add(action, now_us(), now_us())
        for _ in range(counts[2]):
            recorder.wait(action, now_us(), 0.0)
        for _ in range(counts[3]):
            with recorder.during(Phase.LOSS):
                pass
        found.append((time.perf_counter() - start) * 1e6)
    return found


def report(cases: list[dict[str, object]], path: Path | None) -> None:
    machine = f"{os.cpu_count()} x {platform.machine()}, Python {platform.python_version()}"
    machine += f", torch {torch.__version__}"
    print(f"machine: {machine}, load {os.getloadavg()[0]:.1f}")
    for case in cases:
        print(
            f"{case['case']:32} recording {case['ours']:8.1f} us of {case['peer']:9.1f} us: "
            f"{case['ratio']:.2%}"
        )
    if path is not None:
        value = {"name": "recording", "machine": machine, "cases": cases}
        path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
