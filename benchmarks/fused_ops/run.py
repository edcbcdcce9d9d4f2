"""How much of a transfer hides inside the product next to it, by the number of tiles."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from boundary import BYTES, boundary_cases
from on_device import boundary_cases_on, operator_cases_on
from operators import operator_cases

from npu_pipe import World
from npu_pipe.comm.shared import Pace
from npu_pipe.device.choose import KINDS, choose
from npu_pipe.device.device import Device
from npu_pipe.errors import ConfigError
from npu_pipe.launch.group import join
from npu_pipe.launch.guard import guard
from npu_pipe.launch.local import run_local
from npu_pipe.launch.world import Launcher

PRODUCT_MS = 20.0


def wires(bytes_sent: int, product_ms: float) -> dict[str, Pace]:
    """By what this many bytes take beside a product of this length."""
    bytes_per_us = bytes_sent / (product_ms * 1e3)
    return {
        "transfer 0.8 of the product": Pace(latency_us=200, bytes_per_us=bytes_per_us / 0.79),
        "half of it, much latency": Pace(
            latency_us=100 * product_ms, bytes_per_us=bytes_per_us / 0.4
        ),
        "1.6 of it": Pace(latency_us=200, bytes_per_us=bytes_per_us / 1.59),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="a coarse answer in under a minute")
    parser.add_argument("--device", choices=KINDS, help="on real devices, as fast as they are")
    flags = parser.parse_args()
    world = World.from_environment()
    if world.launcher is Launcher.ONE_PROCESS:
        os.environ["OMP_NUM_THREADS"] = "1"
        return run_local([sys.executable, __file__, *sys.argv[1:]], ranks=2)
    with guard(world):
        torch.set_num_threads(1)
        steps = 3 if flags.quick else 15
        join(world)
        if flags.device is None:
            cases, what = on_a_slow_wire(world, steps=steps), "products sleep"
        else:
            cases, what = on_devices(flags.device, world, steps=steps)
        if world.rank == 0:
            report(cases, what, flags.json)
    return 0


def on_a_slow_wire(world: World, *, steps: int) -> list[dict[str, Any]]:
    fast = dist.new_group()
    cases = boundary_cases(
        world, wires=wires(BYTES, PRODUCT_MS), product_ms=PRODUCT_MS, steps=steps
    )
    # A rank sends half of the rows, while it multiplies the other half at least.
    half = wires(BYTES // 2, PRODUCT_MS)
    return cases + operator_cases(fast, wires=half, product_ms=2 * PRODUCT_MS, steps=steps)


def on_devices(wanted: str, world: World, *, steps: int) -> tuple[list[dict[str, Any]], str]:
    device, is_shared, why = pick(wanted, world)
    device.select()
    is_cpu = device.place.type == "cpu"
    size = {"rows": 512, "width": 256} if is_cpu else {"rows": 8192, "width": 8192}
    cases = boundary_cases_on(device, world, **size, is_shared=is_shared, steps=steps)
    if not is_shared:  # its backend does not go between two ranks on one device
        group = dist.new_group(backend=device.backend)
        cases += operator_cases_on(device, group, **size, steps=steps)
    return cases, f"{device.place.type} ({why}){', shared' * is_shared}"


def pick(wanted: str, world: World) -> tuple[Device, bool, str]:
    """The rank's own device; or the first, where there are fewer than ranks. Alike on all."""
    try:
        choose(wanted, index=world.size - 1)
    except ConfigError:
        device, why = choose(wanted, index=0)
        return device, True, why
    device, why = choose(wanted, index=world.local_rank)
    return device, False, why


def report(cases: list[dict[str, Any]], what: str, path: Path | None) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, torch {torch.__version__}, {what}")
    for case in cases:
        line = (
            "{case:56} {ours:7.2f} ms, unfused {peer:7.2f}  ratio {ratio:.3f}  hidden {hidden:6.1%}"
        )
        print(line.format(**case))
        if "by_tiles" not in case:
            continue
        print(f"   predicted best {case['predicted_tiles']}; a tile costs {case['tile_us']:.0f} us")
        for each in case["by_tiles"]:
            print(
                "   {tiles:3} tiles {ms:7.2f} ms (predicted {predicted_ms:7.2f})"
                "  hidden {hidden:6.1%}".format(**each)
            )
    if path is not None:
        result = {"name": "fused_ops", "machine": machine, "cases": cases}
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
