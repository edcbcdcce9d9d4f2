"""How good is the schedule that `npu_pipe.planner.search` finds, in the time it is given?

python benchmarks/search/run.py [--quick] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import npu_pipe
from npu_pipe.planner.by_hand import search_by_hand
from npu_pipe.planner.clock import Clock
from npu_pipe.planner.request import Objective, Request
from npu_pipe.planner.search import Found, search


@dataclass(frozen=True)
class Case:
    """limit: what ours / peer has to stay below. seconds and load: while ours was found."""

    case: str
    ours: float
    peer: float
    limit: float
    seconds: float
    load: float

    @property
    def ratio(self) -> float:
        return self.ours / self.peer

    def as_json(self) -> dict[str, object]:
        return {
            "case": self.case,
            "ours": self.ours,
            "peer": self.peer,
            "unit": "units of the costs",
            "ratio": self.ratio,
            "limit": self.limit,
            "seconds": self.seconds,
            "load": self.load,
        }


def around(rng: Random, low: float, high: float, count: int) -> list[float]:
    return [round(rng.uniform(low, high), 2) for _ in range(count)]


def uneven(rng: Random, p: int, _: int) -> npu_pipe.Costs:
    return npu_pipe.Costs(
        forward=around(rng, 0.7, 1.3, p),
        input_grad=around(rng, 0.7, 1.4, p),
        weight_grad=around(rng, 0.5, 1.1, p),
        transfer=around(rng, 0, 0.1, p - 1),
    )


def heavy_ends(rng: Random, p: int, _: int) -> npu_pipe.Costs:
    """An embedding that is slow in F and W, a head and loss that are slow in all."""
    extra_f, extra_i, extra_w = ([0.0] * p for _ in range(3))
    extra_f[0], extra_w[0] = 0.4, 0.5
    extra_f[-1], extra_i[-1], extra_w[-1] = 0.8, 0.6, 0.5
    return npu_pipe.Costs(
        forward=[a + b for a, b in zip(around(rng, 0.9, 1.1, p), extra_f, strict=True)],
        input_grad=[a + b for a, b in zip(around(rng, 1.0, 1.2, p), extra_i, strict=True)],
        weight_grad=[a + b for a, b in zip(around(rng, 0.7, 0.9, p), extra_w, strict=True)],
        transfer=around(rng, 0, 0.1, p - 1),
    )


def slow_links(rng: Random, p: int, _: int) -> npu_pipe.Costs:
    return npu_pipe.Costs(
        forward=around(rng, 0.8, 1.2, p),
        input_grad=around(rng, 0.8, 1.2, p),
        weight_grad=around(rng, 0.6, 1.0, p),
        transfer=around(rng, 0.3, 1.2, p - 1),
    )


def straggler(rng: Random, p: int, _: int) -> npu_pipe.Costs:
    """One rank at 1.4 times the time, and slow links."""
    slow = rng.randrange(p)
    factor = [1.4 if rank == slow else 1.0 for rank in range(p)]
    times = [
        [a * b for a, b in zip(around(rng, low, low + 0.2, p), factor, strict=True)]
        for low in (0.9, 0.9, 0.7)
    ]
    return npu_pipe.Costs(*times, transfer=around(rng, 0.3, 1.0, p - 1))


def variable_lengths(rng: Random, p: int, m: int) -> npu_pipe.Costs:
    return npu_pipe.Costs(
        forward=around(rng, 0.8, 1.2, p),
        input_grad=around(rng, 0.8, 1.3, p),
        weight_grad=around(rng, 0.6, 1.0, p),
        transfer=around(rng, 0, 0.2, p - 1),
        microbatch_scale=around(rng, 0.4, 1.8, m),
    )


Maker = Callable[[Random, int, int], npu_pipe.Costs]
MAKERS: tuple[Maker, ...] = (uneven, heavy_ends, slow_links, straggler, variable_lengths)


def small(makers: tuple[Maker, ...], seed: int) -> Iterator[Case]:
    """Against the proved optimum: with a solver in under 5 s, and the heuristic alone."""
    p, m = 4, 8
    for maker in makers:
        costs = maker(Random(seed), p, m)
        for label, caps in (("p-r", [p - r for r in range(p)]), ("p", [p] * p), ("2p-1", [7] * p)):
            load = os.getloadavg()[0]
            found = search(costs, ranks=p, microbatches=m, max_activations=caps, time_limit_s=4.5)
            npu_pipe.lower(found.schedule, costs)
            best = found.lower_bound if found.proved else optimum(costs, p, m, caps)
            name = f"p=4 m=8 {maker.__name__}, cap {label}"
            yield Case(f"{name}, against the optimum", found.makespan, best, 1.01,
                       found.seconds, load)  # fmt: skip
            by_hand, seconds = heuristic(costs, p, m, caps)
            yield Case(f"{name}, heuristic alone", by_hand, best, 1.01, seconds, load)


def optimum(costs: npu_pipe.Costs, p: int, m: int, caps: list[int]) -> float:
    """The best proved value, or, where the last is open after two minutes, the bound."""
    found = search(costs, ranks=p, microbatches=m, max_activations=caps, time_limit_s=120, seed=1)
    if not found.proved:
        print(f"after 120 s {found.gap:.2%} open; the peer is the bound", file=sys.stderr)
    return found.lower_bound


def heuristic(costs: npu_pipe.Costs, p: int, m: int, caps: list[int]) -> tuple[float, float]:
    clock = Clock.start(4.5)
    request = Request(costs, tuple(range(p)), tuple(caps), m, True, Objective.MAKESPAN)
    best = search_by_hand(request, rng=Random(0), clock=clock, is_last=True)
    return best.value, clock.spent_s


def middle(seeds: range) -> Iterator[Case]:
    for seed in seeds:
        costs = uneven(Random(seed), 8, 16)
        load = os.getloadavg()[0]
        found = search(costs, ranks=8, microbatches=16, max_activations=8, time_limit_s=19)
        yield against_bound(f"p=8 m=16 uneven {seed}, cap p, against the bound", found, 1.015, load)


def large(makers: tuple[Maker, ...], time_limit_s: float) -> Iterator[Case]:
    p, m = 16, 64
    for maker in makers:
        costs = maker(Random(3), p, m)
        published = npu_pipe.build_schedule("zb-h1", ranks=p, microbatches=m)
        peer = npu_pipe.simulate(published, costs).makespan
        load = os.getloadavg()[0]
        found = search(costs, ranks=p, microbatches=m, max_activations=p, time_limit_s=time_limit_s)
        npu_pipe.lower(found.schedule, costs)
        name = f"p=16 m=64 {maker.__name__}, cap p"
        yield Case(f"{name}, against zb-h1", found.makespan, peer, 1.0, found.seconds, load)
        yield against_bound(f"{name}, against the bound", found, float("inf"), load)


def against_bound(name: str, found: Found, limit: float, load: float) -> Case:
    return Case(name, found.makespan, found.lower_bound, limit, found.seconds, load)


def cases(quick: bool) -> Iterator[Case]:
    yield from small(MAKERS[:2] if quick else MAKERS, seed=1)
    yield from middle(range(3, 4) if quick else range(3, 6))
    yield from large((uneven,) if quick else (uneven, slow_links, variable_lengths),
                     15 if quick else 59)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, under a minute")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the table as JSON")
    arguments = parser.parse_args()
    done = []
    for case in cases(arguments.quick):
        verdict = "ok" if case.ratio <= case.limit else "MISSED"
        print(
            f"{case.case:62} {case.ours:9.3f} {case.peer:9.3f} {case.ratio:7.4f} "
            f"{case.seconds:6.2f} s  load {case.load:4.1f}  {verdict}",
            flush=True,
        )
        done.append(case)
    if arguments.json:
        result = {
            "name": "search",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
            f"Python {platform.python_version()}",
            "cases": [case.as_json() for case in done],
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(case.ratio > case.limit for case in done))


if __name__ == "__main__":
    sys.exit(main())
