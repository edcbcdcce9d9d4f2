"""Jobs that run the same modules through torch's schedule and ours, in one process group."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TheirStage
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate, sum_reducer
from torch.utils import _pytree as pytree

from jobs.models import data, gradients, stage
from npu_pipe import World, torch_api
from npu_pipe.launch.store import open_store

CPU = torch.device("cpu")
V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def connect(world: World, *, timeout_s: float = 60) -> None:
    """What a script for torch begins with."""
    dist.init_process_group(
        "gloo",
        store=open_store(world, timeout_s=30),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )


def stages_of(rank: int, cls: str, *, ranks: int, chunks: int) -> list[int]:
    style = "v" if cls in V else "loop"
    return generate_rank_to_stage_mapping(ranks, ranks * chunks, style)[rank]


def build(
    package: Any, stage_class: Any, cls: str, modules: dict[int, nn.Module], **kw: Any
) -> Any:
    total = kw.pop("total")
    stages = [stage_class(module, index, total, CPU) for index, module in modules.items()]
    made = getattr(package, cls)
    single = issubclass(made, package.PipelineScheduleSingle)
    return made(stages[0] if single else stages, **kw)


def both(cls: str, modules: dict[int, nn.Module], **kw: Any) -> list[tuple[Any, list[nn.Module]]]:
    """(schedule, its modules): torch's and ours, on copies of the modules."""
    made = []
    for package, stage_class in ((theirs, TheirStage), (torch_api, torch_api.PipelineStage)):
        own = copy.deepcopy(modules)
        made.append((build(package, stage_class, cls, own, **kw), list(own.values())))
    return made


def require_equal(found: Any, wanted: Any) -> None:
    """Values of one nesting, tensors equal to the last bits."""
    found_leaves, found_spec = pytree.tree_flatten(found)
    wanted_leaves, wanted_spec = pytree.tree_flatten(wanted)
    assert found_spec == wanted_spec
    for mine, other in zip(found_leaves, wanted_leaves, strict=True):
        if isinstance(other, Tensor):
            assert not mine.requires_grad
            torch.testing.assert_close(mine, other.detach(), rtol=1e-12, atol=1e-14)
        else:
            assert mine == other


def train_both(
    cls: str, modules: dict[int, nn.Module], calls: list[tuple[str, dict[str, Any]]], **kw: Any
) -> int:
    """Make the same calls of both, and compare all that comes of them after each. How many
    gradients were compared."""
    results = []
    for schedule, own in both(cls, modules, **kw):
        outcome = []
        for verb, given in calls:
            losses: list[Tensor] | None = [] if "target" in given else None
            args = given.get("args", ())
            rest = {name: value for name, value in given.items() if name != "args"}
            for module in own:
                module.zero_grad()
            outputs = getattr(schedule, verb)(*args, losses=losses, **rest)
            outcome.append((outputs, losses, gradients(own) if verb == "step" else []))
        results.append(outcome)
    for other, mine in zip(*results, strict=True):
        require_equal(mine, other)
    return len(results[1][0][2])


def every_class(
    world: World, *, cls: str, microbatches: int, chunks: int, scale_grads: bool
) -> int:
    """Two steps on other data, an evaluation between them, and one without outputs."""
    connect(world)
    total = world.size * chunks
    mine = stages_of(world.rank, cls, ranks=world.size, chunks=chunks)
    calls = []
    # torch's eval fails where two neighbours are on one rank.
    for number, verb in enumerate(("step", "step" if cls in V else "eval", "step")):
        inputs, targets = data(3 * microbatches, seed=number)
        given: dict[str, Any] = {"args": (inputs,)} if 0 in mine else {}
        if total - 1 in mine:
            given["target"] = targets
        calls.append((verb, given))
    calls.append(("step", {**calls[0][1], "return_outputs": False}))
    return train_both(
        cls,
        {index: stage(index) for index in mine},
        calls,
        total=total,
        n_microbatches=microbatches,
        loss_fn=nn.functional.mse_loss,
        scale_grads=scale_grads,
    )


class Keyed(nn.Module):
    """A stage with keyword arguments of its own; `pair` returns two tensors."""

    def __init__(self, index: int, *, pair: bool = False) -> None:
        super().__init__()
        self.inner = stage(index)
        self.pair = pair

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, shift: Tensor, scale: float = 1.0
    ) -> Any:
        z = self.inner(x if y is None else x + y) * scale + shift
        return (z, 2 * z) if self.pair else z


def chunk_specs(world: World, *, cls: str, cut: bool) -> int:
    """Two arguments, and keywords on each rank: cut as the arguments are, or not at all."""
    connect(world)
    x, targets = data(8)
    modules: dict[int, nn.Module] = {world.rank: Keyed(world.rank, pair=world.rank == 0)}
    shift, _ = data(8, seed=world.rank)
    given: dict[str, Any] = {"shift": shift if cut else shift[0], "scale": 3.0}
    if world.rank == 0:
        given |= {"args": (x, targets.T.reshape(6, 8).T)}
    else:
        given |= {"target": targets}
    specs = None if cut else {"shift": _Replicate(), "scale": _Replicate()}
    return train_both(
        cls,
        modules,
        [("step", given), ("eval", given)],
        total=world.size,
        n_microbatches=4,
        loss_fn=nn.functional.mse_loss,
        args_chunk_spec=(TensorChunkSpec(0), TensorChunkSpec(0)) if world.rank == 0 else None,
        kwargs_chunk_spec=specs,
    )


class Turned(nn.Module):
    """Takes and gives the batch in dimension 1."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = stage(index)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.T)
        return y.T.contiguous()  # as torch needs it


class Told(nn.Module):
    """Gives its output turned, and a scalar of it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = Turned(index)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, y.sum()


def merge_specs(world: World) -> int:
    """The batch lies in dimension 1 of inputs and outputs; scalars are added up."""
    connect(world)
    inputs, targets = data(8)
    last = world.rank == world.size - 1
    given: dict[str, Any] = {"args": (inputs.T,)} if world.rank == 0 else {}
    if last:
        given["target"] = targets
    return train_both(
        "Schedule1F1B",
        {world.rank: Told(world.rank) if last else Turned(world.rank)},
        [("step", given), ("step", given)],
        total=world.size,
        n_microbatches=4,
        loss_fn=lambda output, target: nn.functional.mse_loss(output[0], target.T),
        args_chunk_spec=TensorChunkSpec.from_tuple((1,)) if world.rank == 0 else None,
        output_merge_spec=(TensorChunkSpec(1), sum_reducer),
    )


def loss_keywords(world: World) -> int:
    """Keyword arguments of the loss, other in each step."""
    connect(world)
    inputs, targets = data(8)

    def loss(output: Tensor, target: Tensor, *, weight: float) -> Tensor:
        return weight * nn.functional.mse_loss(output, target, reduction="sum")

    given: dict[str, Any] = {"args": (inputs,)} if world.rank == 0 else {}
    if world.rank == world.size - 1:
        given["target"] = targets
    return train_both(
        "ScheduleGPipe",
        {world.rank: stage(world.rank)},
        [("step", {**given, "loss_kwargs": {"weight": weight}}) for weight in (0.5, 3.0)],
        total=world.size,
        n_microbatches=4,
        loss_fn=loss,
        scale_grads=False,
    )


def without_a_loss(world: World) -> None:
    """Without a loss_fn, step is eval."""
    connect(world)
    given: dict[str, Any] = {"args": (data(8)[0],)} if world.rank == 0 else {}
    outcome = []
    for schedule, own in both(
        "ScheduleGPipe", {world.rank: stage(world.rank)}, total=world.size, n_microbatches=4
    ):
        with torch.no_grad():
            outcome.append(schedule.step(*given.get("args", ())))
        assert all(p.grad is None for module in own for p in module.parameters())
    require_equal(outcome[1], outcome[0])
