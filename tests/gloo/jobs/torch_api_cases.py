"""Jobs about what users of torch.distributed.pipelining ran into, against the unsplit model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.boundaries import ReusedBuffer
from jobs.models import data, gradients, stage
from jobs.torch_api import CPU, connect, require_equal, stages_of
from npu_pipe import World, torch_api
from npu_pipe.torch_api import PipelineStage

MSE = nn.functional.mse_loss


def make(
    world: World,
    module: nn.Module | None = None,
    *,
    cls: str = "Schedule1F1B",
    microbatches: int = 4,
    loss_fn: Callable[..., Any] | None = MSE,
    timeout_s: float = 60,
    **kw: Any,
) -> tuple[Any, nn.Module]:
    """A schedule of one stage a rank, and its module."""
    connect(world, timeout_s=timeout_s)
    module = module or stage(world.rank)
    made = PipelineStage(module, world.rank, world.size, CPU)
    return getattr(torch_api, cls)(made, microbatches, loss_fn, **kw), module


def give(world: World, inputs: Any, targets: Any, **kw: Any) -> dict[str, Any]:
    """What each rank says of a batch."""
    given: dict[str, Any] = dict(kw)
    if world.rank == 0:
        given["arg"] = inputs
    if world.rank == world.size - 1:
        given["target"] = targets
    return given


def call(verb: Callable[..., Any], given: dict[str, Any]) -> Any:
    rest = {name: value for name, value in given.items() if name != "arg"}
    return verb(given["arg"], **rest) if "arg" in given else verb(**rest)


def whole_of(ranks: int) -> nn.Sequential:
    return nn.Sequential(*(stage(index) for index in range(ranks)))


def require_unsplit(world: World, module: nn.Module, whole: nn.Sequential) -> None:
    require_equal(gradients([module]), gradients([whole[world.rank]]))


def few_microbatches(world: World, *, microbatches: int) -> None:
    """Fewer microbatches than ranks."""
    schedule, module = make(world, microbatches=microbatches)
    inputs, targets = data(4)
    call(schedule.step, give(world, inputs, targets))
    whole = whole_of(world.size)
    MSE(whole(inputs), targets).backward()
    require_unsplit(world, module, whole)


def uneven_rows(world: World, *, cls: str, chunks: int) -> list[int]:
    """10 rows in 4 microbatches. The shapes of what comes back."""
    connect(world)
    total = world.size * chunks
    modules = {i: stage(i) for i in stages_of(world.rank, cls, ranks=world.size, chunks=chunks)}
    stages = [PipelineStage(module, index, total, CPU) for index, module in modules.items()]
    made = getattr(torch_api, cls)
    single = issubclass(made, torch_api.PipelineScheduleSingle)
    schedule = made(stages[0] if single else stages, 4, MSE)
    inputs, targets = data(10)
    given: dict[str, Any] = {"arg": inputs} if 0 in modules else {}
    losses: list[Tensor] = []
    if total - 1 in modules:
        given["target"] = targets
    outputs = call(schedule.step, {**given, "losses": losses})
    evaluated = call(schedule.eval, given)
    whole = whole_of(total)
    wanted = whole(inputs)
    MSE(wanted, targets).backward()
    for index, module in modules.items():
        require_equal(gradients([module]), gradients([whole[index]]))
    if total - 1 not in modules:
        assert outputs is evaluated is None
        assert losses == []
        return []
    for found in (outputs, evaluated):
        require_equal(found, wanted)
    parts = zip(torch.tensor_split(wanted, 4), torch.tensor_split(targets, 4), strict=True)
    require_equal(losses, [MSE(*each) for each in parts])
    return list(outputs.shape)


def sizes_of_evaluations(world: World) -> list[int]:
    """Batches of 8, 4 and 9 rows, with training between them. How many rows came back."""
    schedule, module = make(world)
    whole = whole_of(world.size)
    rows = []
    for size in (8, 4, 9):
        inputs, targets = data(size, seed=size)
        outputs = call(schedule.eval, give(world, inputs, None))
        if outputs is not None:
            require_equal(outputs, whole(inputs))
            rows.append(len(outputs))
        call(schedule.step, give(world, inputs, targets))
        MSE(whole(inputs), targets).backward()
    require_unsplit(world, module, whole)
    return rows


def reused_buffer(world: World) -> list[float]:
    """The losses of a model whose first stage returns one buffer each time."""
    schedule, _ = make(world, ReusedBuffer() if world.rank == 0 else None)
    inputs, targets = data(8)
    losses: list[Tensor] = []
    call(schedule.step, give(world, inputs, targets, losses=losses))
    whole = whole_of(world.size)
    if losses:
        parts = zip(whole(inputs).split(2), targets.split(2), strict=True)
        require_equal(losses, [MSE(*each) for each in parts])
    return [loss.item() for loss in losses]


def two_steps_one_update(world: World, *, cls: str, scale_grads: bool) -> None:
    """The second step adds its gradient, and does not scale the first again."""
    schedule, module = make(world, cls=cls, scale_grads=scale_grads)
    whole = whole_of(world.size)
    for seed in range(2):
        inputs, targets = data(8, seed=seed)
        call(schedule.step, give(world, inputs, targets))
        (MSE(whole(inputs), targets) * (1 if scale_grads else 4)).backward()
    require_unsplit(world, module, whole)


def graphs_end(world: World) -> list[bool]:
    """Of each returned tensor, whether it has a graph."""
    schedule, _ = make(world)
    inputs, targets = data(8)
    losses: list[Tensor] = []
    outputs = call(schedule.step, give(world, inputs, targets, losses=losses))
    kept = [*losses, *([] if outputs is None else [outputs])]
    return [each.requires_grad or each.grad_fn is not None for each in kept]


def batches_counted(world: World) -> int:
    """How many batches a BatchNorm has counted in one step."""
    norm = nn.BatchNorm1d(6, dtype=torch.float64)
    schedule, _ = make(world, nn.Sequential(stage(world.rank), norm))
    inputs, targets = data(8)
    call(schedule.step, give(world, inputs, targets))
    assert norm.num_batches_tracked is not None
    return int(norm.num_batches_tracked)


class Sends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = stage(0)

    def forward(self, x: Tensor, tag: Any, *, note: Any) -> Any:
        assert note is tag
        ids = torch.arange(len(x)) % 2
        return self.inner(x), ids, x > 0, None, True, 2.5


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = stage(1)

    def forward(
        self, x: Tensor, ids: Tensor, mask: Tensor, nothing: None, flag: bool, factor: float
    ) -> Tensor:
        assert ids.dtype is torch.int64
        assert mask.dtype is torch.bool
        assert nothing is None
        assert flag is True
        y: Tensor = self.inner(x.masked_fill(mask, 0.0) + ids[:, None])
        return y * factor


def other_values(world: World) -> None:
    """Ids, a mask, None, a bool and a float cross; an opaque object is an argument."""
    modules = (Sends(), Takes())
    schedule, module = make(world, modules[world.rank])
    inputs, targets = data(8)
    tag = object()
    if world.rank == 0:
        schedule.step(inputs, tag, note=tag)
    else:
        schedule.step(target=targets)
    total = torch.zeros((), dtype=torch.float64)
    whole = (Sends(), Takes())
    for x, y in zip(inputs.split(2), targets.split(2), strict=True):
        total = total + MSE(whole[1](*whole[0](x, tag, note=tag)), y) / 4
    total.backward()
    require_equal(gradients([module]), gradients([whole[world.rank]]))


def lengths_change(world: World) -> None:
    """A sequence of another length in each step and evaluation."""
    schedule, module = make(world)
    whole = whole_of(world.size)
    for length in (5, 3, 8, 5):
        inputs, targets = data(8 * length, seed=length)
        inputs, targets = inputs.view(8, length, 6), targets.view(8, length, 6)
        outputs = call(schedule.eval, give(world, inputs, None))
        if outputs is not None:
            require_equal(outputs, whole(inputs))
        call(schedule.step, give(world, inputs, targets))
        MSE(whole(inputs), targets).backward()
    require_unsplit(world, module, whole)


class Named(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = stage(index)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(x), "double": 2 * x}


def dicts(world: World) -> list[str]:
    """A dict as output, and as target."""

    def loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
        return MSE(output["logits"], target["labels"]) + output["double"].mean()

    last = world.rank == world.size - 1
    schedule, module = make(world, Named(world.rank) if last else None, loss_fn=loss)
    inputs, targets = data(8)
    outputs = call(schedule.step, give(world, inputs, {"labels": targets}))
    before = whole_of(world.size)[: world.size - 1]
    whole = nn.Sequential(*before, Named(world.size - 1))
    wanted = whole(inputs)
    loss(wanted, {"labels": targets}).backward()
    require_unsplit(world, module, whole)
    if outputs is None:
        return []
    require_equal(outputs, wanted)
    return sorted(outputs)


class InPlace(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.tanh = stage(index)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tanh(x.mul_(2.0))
        return self.linear(y)


def in_place(world: World) -> None:
    """Each stage works on its input in place."""
    schedule, module = make(world, InPlace(world.rank))
    inputs, targets = data(8)
    call(schedule.step, give(world, inputs.clone(), targets))
    whole = nn.Sequential(*(InPlace(index) for index in range(world.size)))
    MSE(whole(inputs.clone()), targets).backward()
    require_unsplit(world, module, whole)


def replicas(world: World, *, cls: str, groups: list[list[int]]) -> None:
    """Two pipelines of two ranks, each with half of the batch; their gradients are averaged."""
    connect(world)
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    twins = [(list(pair), dist.new_group(list(pair))) for pair in zip(*groups, strict=True)]
    ranks, pipeline = next(each for each in made if world.rank in each[0])
    _, replica = next(each for each in twins if world.rank in each[0])
    place = ranks.index(world.rank)
    chunks = 1 if cls == "Schedule1F1B" else 2
    modules = {i: stage(i) for i in stages_of(place, cls, ranks=2, chunks=chunks)}
    stages = [PipelineStage(m, i, 2 * chunks, CPU, group=pipeline) for i, m in modules.items()]
    assert {(each.group_rank, each.group_size) for each in stages} == {(place, 2)}
    schedule = getattr(torch_api, cls)(stages if chunks > 1 else stages[0], 4, MSE)
    inputs, targets = data(16)
    half = slice(0, 8) if ranks == groups[0] else slice(8, 16)
    given: dict[str, Any] = {"target": targets[half]} if 2 * chunks - 1 in modules else {}
    call(schedule.step, {**given, "arg": inputs[half]} if 0 in modules else given)
    for gradient in gradients(list(modules.values())):
        dist.all_reduce(gradient, group=replica)
        gradient.div_(2)
    whole = whole_of(2 * chunks)
    MSE(whole(inputs), targets).backward()
    for index, module in modules.items():
        require_equal(gradients([module]), gradients([whole[index]]))


def cut_already(world: World, *, cls: str) -> None:
    """Microbatches of 1, 4, 2 and 3 rows and as many lengths; the first want a gradient."""
    schedule, module = make(world, cls=cls, scale_grads=False)
    whole = whole_of(world.size)
    total = torch.zeros((), dtype=torch.float64)
    args, targets = [], []
    for number, rows in enumerate((1, 4, 2, 3)):
        x, y = (each.view(rows, -1, 6) for each in data(rows * (number + 1), seed=number))
        args.append(x.requires_grad_())
        targets.append(y)
    losses: list[Tensor] = []
    schedule.step(
        arg_mbs=[(x,) for x in args] if world.rank == 0 else None,
        target_mbs=targets if world.rank == world.size - 1 else None,
        losses=losses,
        return_outputs=False,
    )
    own = [x.grad for x in args]
    wanted = [MSE(whole(x), y) for x, y in zip(args, targets, strict=True)]
    for x in args:
        x.grad = None
    for loss in wanted:
        total = total + loss
    total.backward()
    require_unsplit(world, module, whole)
    if world.rank == 0:
        require_equal(own, [x.grad for x in args])
    if world.rank == world.size - 1:
        require_equal(losses, wanted)
