"""How long it takes to build, lower, check and simulate a large schedule, beside torch's own.

    python benchmarks/schedule_build/run.py [--quick] [--json OUT]

Both sides run in fresh child processes, taking turns; importing is not counted. Times are CPU
seconds: each side is one thread that never waits, and other users of the machine count less.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

FAMILIES = {  # ours: the class of torch.distributed.pipelining, and its placement
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", "loop"),
    "zb-v": ("ScheduleZBVZeroBubble", "v"),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", "loop"),
}
CHUNKS = 2
SMALL, LARGE, LARGEST = (16, 128), (64, 512), (128, 1024)
CPU_LIMIT_S = 300  # a side that takes longer is stopped
LIMIT_S, LIMIT_GB, LIMIT_GROWTH = 10, 4, 1.5  # for LARGEST, against SMALL


def prepare_ours(name: str, ranks: int, microbatches: int) -> Callable[[], int]:
    import npu_pipe

    costs = npu_pipe.Costs.uniform(ranks * CHUNKS)

    def work() -> int:
        schedule = npu_pipe.build_schedule(name, ranks=ranks, microbatches=microbatches)
        program = npu_pipe.lower(schedule, costs)
        npu_pipe.check(program)
        npu_pipe.simulate(program, costs)
        return sum(map(len, program.orders))

    return work


def prepare_torchs(name: str, ranks: int, microbatches: int) -> Callable[[], int]:
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
    from torch.distributed.pipelining.stage import _PipelineStageBase

    class Stage(_PipelineStageBase):
        """What a schedule class asks of a stage, without a process group."""

        _create_grad_recv_info = _prepare_forward_infra = _prepare_backward_infra = None

        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages = index, ranks * CHUNKS
            self.group_rank, self.group_size = 0, ranks
            self.submod = None

    class_name, style = FAMILIES[name]
    homes = generate_stage_to_rank_mapping(ranks, ranks * CHUNKS, style=style)
    stages = [Stage(stage) for stage, rank in homes.items() if rank == 0]
    notes = (schedules.UNSHARD, schedules.RESHARD, schedules.REDUCE_GRAD)

    def work() -> int:
        built = getattr(schedules, class_name)(stages, microbatches)  # builds and lowers
        orders = {  # its simulator refuses the notes for FSDP that its lowering writes
            rank: [action for action in order if action.computation_type not in notes]
            for rank, order in built.pipeline_order_with_comms.items()
        }
        count = sum(map(len, orders.values()))
        home = built.stage_index_to_group_rank.__getitem__
        schedules._simulate_comms_compute(orders, home, ranks * CHUNKS)
        return count

    return work


PREPARE = {"ours": prepare_ours, "torch": prepare_torchs}


def child(side: str, name: str, ranks: int, microbatches: int) -> None:
    """One side of one case: its seconds (the median of five where it is short), on stdout."""
    work = PREPARE[side](name, ranks, microbatches)
    limit = int(time.process_time()) + CPU_LIMIT_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    seconds: list[float] = []
    actions = 0
    while not seconds or (seconds[0] < 2 and len(seconds) < 5):
        gc.collect()
        start = time.process_time()
        actions = work()
        seconds.append(time.process_time() - start)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"seconds": median(seconds), "actions": actions, "peak_gb": peak_gb}))


def measure(side: str, name: str, size: tuple[int, int]) -> dict[str, Any]:
    """Run a child; "stopped" is set where it was ended at CPU_LIMIT_S."""
    command = [sys.executable, __file__, "--child", side, name, *map(str, size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == -signal.SIGXCPU:
        return {"seconds": CPU_LIMIT_S, "stopped": True}
    done.check_returncode()
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def against_torch(name: str, size: tuple[int, int], rounds: int) -> dict[str, Any]:
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], "torch": []}
    for _ in range(rounds):
        for side, results in sides.items():
            results.append(measure(side, name, size))
    stopped = any("stopped" in result for result in sides["torch"])
    bound = f" (torch was stopped after {CPU_LIMIT_S} s: at least)" if stopped else ""
    ours, peer = (median(r["seconds"] for r in results) for results in sides.values())
    return case(f"{name}, {size[0]} x {size[1]}{bound}", ours, peer, "s")


def growth(name: str, size: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    """Time an action at a size against SMALL, and what the size takes against its limits."""
    pairs = [(measure("ours", name, size), measure("ours", name, SMALL)) for _ in range(rounds)]
    large, small = (
        median(pair[i]["seconds"] / pair[i]["actions"] * 1e6 for pair in pairs) for i in (0, 1)
    )
    what = f"{name}, {size[0]} x {size[1]}"
    cases = [case(f"{what}, an action, against {SMALL[0]} x {SMALL[1]}", large, small, "us")]
    if size == LARGEST:
        seconds = median(pair[0]["seconds"] for pair in pairs)
        peak_gb = median(pair[0]["peak_gb"] for pair in pairs)
        cases.append(case(f"{what}, against the limit of {LIMIT_S} s", seconds, LIMIT_S, "s"))
        cases.append(case(f"{what}, against the limit of {LIMIT_GB} GB", peak_gb, LIMIT_GB, "GB"))
    return cases


def case(what: str, ours: float, peer: float, unit: str) -> dict[str, Any]:
    row = {"case": what, "ours": ours, "peer": peer, "unit": unit, "ratio": ours / peer}
    print(f"| {what} | {ours:.3g} {unit} | {peer:.3g} {unit} | {peer / ours:.1f} |", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the result there")
    parser.add_argument("--quick", action="store_true", help="the small size, under a minute")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="medians of N")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        side, name, ranks, microbatches = arguments.child
        child(side, name, int(ranks), int(microbatches))
        return
    load = [os.getloadavg()[0]]
    print("| case | ours | peer | peer / ours |\n|---|---|---|---|")
    rounds = 1 if arguments.quick else arguments.rounds
    cases = [against_torch(name, SMALL, rounds) for name in FAMILIES]
    if not arguments.quick:
        cases += [against_torch(name, LARGE, rounds) for name in FAMILIES]
    for name in FAMILIES:
        cases += growth(name, LARGE if arguments.quick else LARGEST, rounds)
    load.append(os.getloadavg()[0])
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before_and_after": load,
    }
    result = {"name": "schedule_build", "machine": machine, "cases": cases}
    print(machine)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
