"""Two replicas of the model: what their ranks have to exchange.

With mirrored microbatches (DualPipe, Chimera) stage s lies on rank r = placement[s] and on rank
p-1-r too:

    rank     0      1      2      3
    stages   0, 3   1, 2   2, 1   3, 0

so ranks r and p-1-r hold the same stages, and after a step each sends the other the gradients
of its own microbatches. Both add them in one order, which keeps the replicas equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from npu_pipe.comm.failure import peer_failures
from npu_pipe.comm.groups import Groups
from npu_pipe.ir.program import Lane
from npu_pipe.runtime.gradients import zero_gradient

__all__ = ["add_replica", "set_aside"]

Grads = list[Tensor | None]


def set_aside(stages: Mapping[int, nn.Module]) -> Grads:
    """Take the gradients that are there before a step away, so that they are not exchanged."""
    before: Grads = []
    for parameter in _parameters(stages):
        before.append(parameter.grad)
        parameter.grad = None
    return before


def add_replica(stages: Mapping[int, nn.Module], before: Grads, *, groups: Groups) -> None:
    """Add the other replica's gradients of this step, and then those set aside before it.

    A gradient that only one replica has made counts as zero on the other; one that none has made
    stays None. The middle one of an odd number of ranks is its own partner.
    """
    partner = groups.size - 1 - groups.rank
    if partner != groups.rank:
        parameters = _used(
            [p for p in _parameters(stages) if p.requires_grad], partner, groups=groups
        )
        mine = [p.grad if p.grad is not None else zero_gradient(p) for p in parameters]
        theirs = _swap(mine, partner, groups=groups)
        for parameter, own, other in zip(parameters, mine, theirs, strict=True):
            parameter.grad = own + other if groups.rank < partner else other + own
    for parameter, old in zip(_parameters(stages), before, strict=True):
        if old is not None:
            parameter.grad = old if parameter.grad is None else parameter.grad.add_(old)


def _used(
    parameters: Sequence[nn.Parameter], partner: int, *, groups: Groups
) -> list[nn.Parameter]:
    """Those of which one of the two has a gradient."""
    if not parameters:
        return []
    flags = [parameter.grad is not None for parameter in parameters]
    own = torch.tensor(flags, dtype=torch.uint8, device=parameters[0].device)
    (other,) = _swap([own], partner, groups=groups)
    there = (own | other).tolist()
    return [parameter for parameter, is_there in zip(parameters, there, strict=True) if is_there]


def _swap(tensors: Sequence[Tensor], partner: int, *, groups: Groups) -> list[Tensor]:
    """Give a rank these tensors, and get its own of the same shapes."""
    out, back = (Lane.DOWN, Lane.UP) if partner > groups.rank else (Lane.UP, Lane.DOWN)
    found = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in tensors]
    kept = [tensor.contiguous() for tensor in tensors]
    with peer_failures(f"rank {groups.rank} was exchanging gradients with rank {partner}"):
        works = [groups.lane(back).recv([tensor], partner, 0) for tensor in found]
        works += [groups.lane(out).send([tensor], partner, 0) for tensor in kept]
        while works:
            works.pop(0).wait()
    return found


def _parameters(stages: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    """In an order that is the same on both ranks: by stage, then as the module gives them."""
    return [parameter for stage in sorted(stages) for parameter in stages[stage].parameters()]
