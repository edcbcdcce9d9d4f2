"""Jobs that run the fused operators of torch_npu. On A2 a process has one communicator for them, so
a job that uses them is the first and the last one of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jobs import fused, sharded

from npu_pipe import World
from npu_pipe.comm.axes import open_axes
from npu_pipe.device.choose import choose
from npu_pipe.launch.group import join
from npu_pipe.launch.mesh import Axis, Mesh
from npu_pipe.ops.operators import Operators
from npu_pipe.ops.ranks import ranks_of
from npu_pipe_kernels.providers import providers

products = partial(fused.products, kind="npu")
functions = partial(fused.functions, kind="npu")
refused = partial(fused.refused, kind="npu")
chosen = partial(fused.chosen, kind="npu")
trains = partial(sharded.trains, kind="npu")
one_fails = partial(sharded.one_fails, kind="npu")


def two_groups(world: World, *, size: Sequence[int]) -> list[list[str]]:
    """One process with fused products in two groups: who serves the second one."""
    device = choose("npu", index=world.rank).device
    device.select()
    join(world)
    both = providers()
    found: list[list[str]] = []
    for mesh, axis in ((Mesh(tp=world.size), Axis.TP), (Mesh(dp=world.size), Axis.DP)):
        axes = [each for each in mesh.axes(world.rank) if each[0] == axis.value]
        groups = open_axes(axes, device=device, timeout_s=60)
        operators = Operators(ranks_of(groups[axis.value], device.place), both)
        rows, depth, columns = size
        x = torch.ones(rows, depth, dtype=torch.bfloat16, device=device.place)
        out, _ = operators.all_gather_matmul(x, x.new_ones(depth, columns))
        assert torch.equal(out.cpu(), torch.full_like(out.cpu(), depth))
        found += [list(row) for row in operators.rows()]
    return found


def breaks_the_rule(world: World, *, size: Sequence[int]) -> Any:
    """Two groups with a provider each, which is once too often: what the operator says."""
    device = choose("npu", index=world.rank).device
    device.select()
    join(world)
    for mesh, axis in ((Mesh(tp=world.size), Axis.TP), (Mesh(dp=world.size), Axis.DP)):
        axes = [each for each in mesh.axes(world.rank) if each[0] == axis.value]
        groups = open_axes(axes, device=device, timeout_s=60)
        operators = Operators(ranks_of(groups[axis.value], device.place), providers(), wanted="npu")
        rows, depth, columns = size
        x = torch.ones(rows, depth, dtype=torch.bfloat16, device=device.place)
        operators.all_gather_matmul(x, x.new_ones(depth, columns))
        torch.npu.synchronize()
