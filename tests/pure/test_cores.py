"""Cores of their own for ranks: by NUMA node, and only where there are enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_pipe.launch.cores import Core, bound_to, read_cores, share_cores


def machine(nodes: int, cores: int, threads: int = 1) -> list[Core]:
    """Threads of a core are numbered as Linux does: first all first ones, then all second."""
    total = nodes * cores
    return [
        Core(core // cores, tuple(core + k * total for k in range(threads)))
        for core in range(total)
    ]


def test_the_ranks_of_the_picture() -> None:
    assert share_cores(machine(2, 4), 4) == tuple(map(frozenset, ({0, 1}, {2, 3}, {4, 5}, {6, 7})))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("nodes", "cores", "ranks"),
    [(4, 48, 8), (2, 4, 4), (1, 8, 3), (4, 4, 2), (8, 24, 16), (3, 6, 4), (2, 5, 2), (4, 4, 3)],
)
def test_parts_are_disjoint_whole_cores_on_one_node_where_that_can_be(
    nodes: int, cores: int, ranks: int, threads: int
) -> None:
    found = machine(nodes, cores, threads)
    parts = share_cores(found, ranks)
    assert len(parts) == ranks
    assert sum(map(len, parts)) == len(frozenset().union(*parts)) == nodes * cores * threads
    for part in parts:
        mine = [core for core in found if part & set(core.cpus)]
        assert all(set(core.cpus) <= part for core in mine), "no core is shared"
        assert ranks < nodes or len({core.node for core in mine}) == 1


@pytest.mark.parametrize(("nodes", "cores", "ranks"), [(1, 2, 2), (1, 7, 4), (2, 4, 5), (0, 0, 1)])
def test_nobody_is_bound_where_a_rank_would_get_less_than_two_cores(
    nodes: int, cores: int, ranks: int
) -> None:
    assert share_cores(machine(nodes, cores), ranks) == ()


def test_the_kernels_lists_are_read(tmp_path: Path) -> None:
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(f"{cpus}\n")
    for cpu in range(8):
        topology = tmp_path / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert read_cores(tmp_path, allowed=range(8)) == tuple(
        Core(cpu // 2, (cpu, cpu + 4)) for cpu in range(4)
    )
    assert read_cores(tmp_path, allowed={1, 5, 6}) == (Core(0, (1, 5)), Core(1, (6,)))


def test_a_kernel_that_tells_nothing_has_cores_on_one_node(tmp_path: Path) -> None:
    assert read_cores(tmp_path, allowed={3, 1}) == (Core(0, (1,)), Core(0, (3,)))


def test_what_is_started_in_the_block_is_bound_and_this_process_is_not_afterwards() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    with bound_to(one):
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == f"{sorted(one)}\n"
    assert os.sched_getaffinity(0) == before
    with bound_to(()):
        assert os.sched_getaffinity(0) == before
