"""Kill test: kill -9, exceptions and stalls at random actions, and what the other ranks say.

Each injection starts four new ranks, runs a step, and strikes in the second one. Every other rank
must raise PeerError with the right rank, stage and action within ten seconds, and on a stall one
of them must print the table. The faults are those of tests/gloo/jobs/injections.py. Exit status 1
if any was not told right.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import socket
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2] / "tests" / "gloo"
sys.path[:0] = [str(TESTS)]  # in the ranks too: they are forked from a server that imports this

import torch  # noqa: E402
from jobs.injections import FAULTS, Injection, inject, injection, mistakes  # noqa: E402

from npu_pipe import World  # noqa: E402
from npu_pipe.launch.world import Launcher  # noqa: E402

RANKS, LIMIT_S, TIMEOUT_S, PATIENCE_S = 4, 10.0, 8.0, 40.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="a coarse answer in under a minute")
    parser.add_argument("--first", type=int, default=0, help="number of the first injection")
    parser.add_argument("--count", type=int, default=None, help="100 by default")
    flags = parser.parse_args()
    count = flags.count or (8 if flags.quick else 100)
    seconds: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    wrong = 0
    for seed in range(flags.first, flags.first + count):
        case = injection(seed, ranks=RANKS)
        said, found = run(case)
        seconds[case.fault] += [each["seconds"] for each in said]
        late = [each for each in said if each["seconds"] > LIMIT_S]
        found += [f"a rank came after {each['seconds']:.1f} s" for each in late]
        wrong += bool(found)
        times = " ".join(f"{each['seconds']:6.3f}" for each in said)
        verdict = "right" if not found else "WRONG: " + "; ".join(found)
        what = f"{case.schedule:17}{case.fault:6} {case.action:5} {case.link:8}"
        print(f"{seed:4d}  {what}{times}  {verdict}")
        sys.stdout.flush()
    print(f"\n{count} injections, {wrong} of them told wrong")
    cases = [summary(fault, times) for fault, times in seconds.items() if times]
    for each in cases:
        print(f"{each['case']:6} median {each['ours']:6.3f} s, last {each['last']:6.3f} s")
    if flags.json is not None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        result = {"name": "faults", "machine": machine, "wrong": wrong, "cases": cases}
        flags.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


def summary(fault: str, times: list[float]) -> dict[str, object]:
    ours = statistics.median(times)
    return {
        "case": fault,
        "ours": ours,
        "last": max(times),
        "peer": LIMIT_S,
        "unit": "s",
        "ratio": ours / LIMIT_S,
    }


def run(case: Injection) -> tuple[list[dict[str, Any]], list[str]]:
    """What the other ranks said, and what is wrong with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "npu_pipe", __name__])
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        ranks = [
            context.Process(target=one_rank, args=(tuple(case), rank, port, folder))
            for rank in range(case.ranks)
        ]
        for process in ranks:
            process.start()
        others = [rank for rank in range(case.ranks) if rank != case.rank]
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and any(ranks[rank].is_alive() for rank in others):
            time.sleep(0.05)
        hung = [rank for rank in others if ranks[rank].is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        files = [Path(folder) / f"{rank}.json" for rank in others]
        said = [json.loads(file.read_text()) for file in files if file.exists()]
    found = mistakes(case, said)
    if hung:
        found.append(f"ranks {hung} hang")
    if len(said) + len(hung) < len(others):
        found.append("a rank ended in another way")
    return said, found


def one_rank(case: tuple[Any, ...], rank: int, port: int, folder: str) -> None:
    """Rank 0 serves the store at which the ranks meet."""
    schedule, ranks, odd, action, fault, link = case
    torch.set_num_threads(1)
    world = World(
        rank=rank,
        size=ranks,
        local_rank=rank,
        address="127.0.0.1",
        port=port,
        launcher=Launcher.TORCHRUN,
    )
    answer = inject(
        world,
        schedule=schedule,
        rank=odd,
        action=action,
        fault=fault,
        link=link,
        limit_s=TIMEOUT_S,
        note=f"{folder}/moment",
    )
    part = Path(folder) / f"{rank}.part"
    part.write_text(json.dumps(answer))
    part.rename(Path(folder) / f"{rank}.json")


def free_port() -> int:
    """Below those that the kernel gives out by itself: another process would get it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


if __name__ == "__main__":
    sys.exit(main())
