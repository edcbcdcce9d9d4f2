"""Jobs about gradients of what a script gives, and about what its loss function gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TheirStage
from torch.distributed.pipelining import schedules as theirs

from jobs.models import data, gradients, stage
from jobs.torch_api import CPU, connect, require_equal, stages_of
from jobs.torch_api_cases import MSE, call, give, make, require_unsplit, whole_of
from npu_pipe import WithLoss, World, torch_api
from npu_pipe.torch_api import PipelineStage
from npu_pipe.torch_api.microbatch import TensorChunkSpec, _Replicate


class Shifted(nn.Module):
    """A stage with two keywords: `shift` has its rows in dimension 1, `scale` has none."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = stage(index)

    def forward(self, x: Tensor, *, shift: Tensor, scale: Tensor) -> Tensor:
        y: Tensor = self.inner(x + shift.T)
        return y * scale


def given_gradients(world: World, *, cls: str, chunks: int, rows: int) -> None:
    """Inputs, targets and keywords require gradients. Two steps, beside the unsplit model."""
    connect(world)
    total = world.size * chunks
    mine = stages_of(world.rank, cls, ranks=world.size, chunks=chunks)
    modules = {index: Shifted(index) for index in mine}
    made = getattr(torch_api, cls)
    stages = [PipelineStage(module, index, total, CPU) for index, module in modules.items()]
    schedule = made(
        stages[0] if chunks == 1 else stages,
        4,
        MSE,
        kwargs_chunk_spec={"shift": TensorChunkSpec(1), "scale": _Replicate()},
    )
    values = (*data(rows), data(rows, seed=1)[0].T.contiguous(), torch.tensor(3.0).double())
    x, y, shift, scale = (value.requires_grad_() for value in values)
    _, _, *keywords = unsplit = copy.deepcopy((x, y, shift, scale))
    whole = [Shifted(index) for index in range(total)]
    for _ in range(2):
        schedule.step(
            *((x,) if 0 in mine else ()),
            target=y if total - 1 in mine else None,
            shift=shift,
            scale=scale,
        )
        value = unsplit[0]
        for index, module in enumerate(whole):  # a rank has the keywords to itself
            shared = [k if index in mine else k.detach() for k in keywords]
            value = module(value, shift=shared[0], scale=shared[1])
        MSE(value, unsplit[1]).backward()
    require_equal(
        gradients(list(modules.values())), [g for i in mine for g in gradients([whole[i]])]
    )
    require_equal(x.grad, unsplit[0].grad if 0 in mine else None)
    require_equal(y.grad, unsplit[1].grad if total - 1 in mine else None)
    require_equal([shift.grad, scale.grad], [keyword.grad for keyword in keywords])


def graph_before(world: World) -> None:
    """What makes the batch is trained too: its graph is gone through once, by all microbatches."""
    schedule, module = make(world)
    inputs, targets = data(8)
    before = stage(9)
    call(schedule.step, give(world, before(inputs), targets))
    whole, own = whole_of(world.size), stage(9)
    MSE(whole(own(inputs)), targets).backward()
    require_unsplit(world, module, whole)
    if world.rank == 0:
        require_equal(gradients([before]), gradients([own]))


def evaluation_gives_none(world: World) -> bool:
    """Whether a batch that requires gradients gets some of an evaluation."""
    schedule, _ = make(world)
    inputs, targets = data(8)
    call(schedule.eval, give(world, inputs.requires_grad_(), targets))
    return inputs.grad is not None


def _shaped(output: Tensor, target: Tensor, *, shape: list[int]) -> Tensor:
    return MSE(output, target).reshape(shape)


def one_element(world: World, *, shape: list[int]) -> list[int]:
    """A loss of one element, in a shape that is no scalar's. The shape in which it comes back."""
    schedule, module = make(world, loss_fn=partial(_shaped, shape=shape))
    inputs, targets = data(8)
    losses: list[Tensor] = []
    call(schedule.step, give(world, inputs, targets, losses=losses))
    whole = whole_of(world.size)
    MSE(whole(inputs), targets).backward()
    require_unsplit(world, module, whole)
    if losses:
        parts = zip(whole(inputs).split(2), targets.split(2), strict=True)
        require_equal(losses, [MSE(*each).reshape(shape) for each in parts])
    return [losses[0].dim()] if losses else []


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a vector": lambda output, target: MSE(output, target, reduction="none").mean(1),
    "a number": lambda output, target: float(MSE(output, target)),
    "a dict": lambda output, target: {"loss": MSE(output, target), "rows": len(output)},
    "the output": lambda output, target: output,
}


def evaluated(world: World, *, form: str) -> int:
    """What a loss function gives in an evaluation, in any form. How many came back."""
    schedule, _ = make(world, loss_fn=FORMS[form])
    inputs, targets = data(8)
    losses: list[Any] = []
    call(schedule.eval, give(world, inputs, targets, losses=losses))
    if losses:
        outputs = whole_of(world.size)(inputs).detach()
        parts = zip(outputs.split(2), targets.split(2), strict=True)
        require_equal(losses, [FORMS[form](*each) for each in parts])
    return len(losses)


def pipeline_below(world: World) -> int:
    """3 rows in at most 4 microbatches, by the Pipeline underneath. How many losses."""
    schedule, _ = make(world)
    inputs, targets = data(3)
    first, last = world.rank == 0, world.rank == world.size - 1
    result = schedule.pipeline.evaluate((inputs if first else None, targets if last else None))
    wanted = MSE(whole_of(world.size)(inputs), targets)
    torch.testing.assert_close(torch.tensor(result.loss).double(), wanted)
    return len(result.losses)


def nothing_wanted(world: World, *, cls: str, verb: str) -> list[Any]:
    """No loss, or no target, and outputs are not wanted on the last rank, and then on none. What
    came back."""
    ran = []
    module = nn.Sequential(stage(world.rank))
    module.register_forward_hook(lambda *_: ran.append(1))
    schedule, _ = make(world, module, cls=cls, loss_fn=None if verb == "step" else MSE)
    given = give(world, data(8)[0], None)
    last = world.rank == world.size - 1
    found = [call(getattr(schedule, verb), {**given, "return_outputs": not last})]
    found.append(call(getattr(schedule, verb), {**given, "return_outputs": False}))
    assert len(ran) == 8
    return found


class Balanced(nn.Module):
    """A stage with an auxiliary loss: its own way to say so, or torch users' (see `Adds`)."""

    def __init__(self, index: int, *, own: bool) -> None:
        super().__init__()
        self.inner = stage(index)
        self.own = own

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        loss = y.square().mean()
        return WithLoss(y, loss) if self.own else Adds.apply(y, loss)


class Adds(torch.autograd.Function):
    """Gives its first argument, and the second a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], torch.ones((), dtype=ctx.dtype)


def auxiliary(world: World, *, own: bool, scale_grads: bool) -> None:
    """Auxiliary losses of each stage, beside torch's schedule that adds them by a Function."""
    connect(world)
    inputs, targets = data(8)
    given = give(world, inputs, targets)
    results = []
    for package, kind in ((theirs, TheirStage), (torch_api, PipelineStage)):
        module = Balanced(world.rank, own=own and package is torch_api)
        made = kind(module, world.rank, world.size, CPU)
        schedule = package.Schedule1F1B(made, 4, MSE, scale_grads=scale_grads)
        call(schedule.step, given)
        results.append(gradients([module]))
    require_equal(results[1], results[0])
