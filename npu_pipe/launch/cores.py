"""Which cores each rank of this machine computes on.

A rank that wanders from one NUMA node to another leaves its memory behind; ranks that share a
core wait for each other. So each gets cores of its own, of one NUMA node where there are as many
ranks as nodes or more:

    node 0: cores 0 1 2 3     ranks 0 and 1 -> {0, 1}, {2, 3}
    node 1: cores 4 5 6 7     ranks 2 and 3 -> {4, 5}, {6, 7}

Where a rank would get fewer than two cores nobody is bound: then the kernel, which sees what else
runs, does better.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Core", "bound_to", "read_cores", "share_cores"]

_LEAST = 2
_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True, order=True)
class Core:
    """node: NUMA node. cpus: the kernel's numbers of its hardware threads, ascending."""

    node: int
    cpus: tuple[int, ...]


def read_cores(
    system: Path = _SYSTEM, *, allowed: Collection[int] | None = None
) -> tuple[Core, ...]:
    """The cores that this process may use, by node. Where the kernel does not tell, each hardware
    thread is a core, on node 0. allowed: hardware threads; those of this process by default."""
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in _numbers(folder / "cpulist")
    }
    cores = set()
    for cpu in allowed:
        siblings = _numbers(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        cpus = tuple(sorted({cpu, *siblings}.intersection(allowed)))
        cores.add(Core(nodes.get(cpu, 0), cpus))
    return tuple(sorted(cores))


def share_cores(cores: Sequence[Core], ranks: int) -> tuple[frozenset[int], ...]:
    """The hardware threads of each rank; empty where nobody is to be bound."""
    nodes = [
        [core for core in cores if core.node == node]
        for node in sorted({core.node for core in cores})
    ]
    if ranks < len(nodes):
        parts = [
            [
                core
                for k, node in enumerate(nodes)
                if k * ranks // len(nodes) == rank
                for core in node
            ]
            for rank in range(ranks)
        ]
    else:
        owners = [rank * len(nodes) // ranks for rank in range(ranks)]
        parts = []
        for k, node in enumerate(nodes):
            count = owners.count(k)
            parts += [
                node[i * len(node) // count : (i + 1) * len(node) // count] for i in range(count)
            ]
    if min((len(part) for part in parts), default=0) < _LEAST:
        return ()
    return tuple(frozenset(cpu for core in part for cpu in core.cpus) for part in parts)


@contextmanager
def bound_to(cpus: Collection[int]) -> Iterator[None]:
    """What is started in the block runs there, from its first instruction on; everywhere that
    this process may run, if there are none."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _numbers(path: Path) -> list[int]:
    """Of a list as the kernel writes it: 0-3,8. Empty if it cannot be read."""
    try:
        text = path.read_text().strip()
        ends = [part.partition("-") for part in text.split(",") if part]
        return [n for low, _, high in ends for n in range(int(low), int(high or low) + 1)]
    except (OSError, ValueError):
        return []
