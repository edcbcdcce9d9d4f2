"""Stages wrapped in DistributedDataParallel, which knows nothing of microbatches.

Its hooks expect one backward after each forward; a pipeline has several forwards under way, and
halves of backwards. So they are kept still while windows run (`no_sync`, which is made for
accumulation), and its gradients are averaged once after them, over its own process group:

    F0 F1 B0 F2 B1 B2 | sum of the gradients / ranks        as it does itself without microbatches

For fully_shard see `sharded`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Wrapper

from npu_pipe.comm.failure import peer_failures
from npu_pipe.errors import ConfigError
from npu_pipe.runtime.gradients import zero_gradient

__all__ = ["average_gradients", "kept_still", "wrappers_in"]

_BUCKET = 1 << 24  # numbers that are summed at once


def wrappers_in(modules: Iterable[nn.Module]) -> list[Wrapper]:
    """Those in, or around, the modules of stages.

    Raises ConfigError for one that does with gradients what `average_gradients` does not.
    """
    found = [part for module in modules for part in module.modules() if isinstance(part, Wrapper)]
    for wrapper in found:
        for is_so, what in (
            (wrapper.static_graph, "static_graph=True"),
            (bool(wrapper._comm_hooks), "a communication hook"),
            (wrapper._delay_all_reduce_all_params, "delay_all_reduce_named_params"),
            (wrapper.mixed_precision is not None, "mixed_precision"),
        ):
            if is_so:
                raise ConfigError(
                    "a pipeline averages the gradients of DistributedDataParallel itself, plainly",
                    f"a stage is wrapped with {what}",
                    "wrap it without, or shard it with torch.distributed.fsdp.fully_shard",
                )
    return found


@contextmanager
def kept_still(wrappers: Iterable[Wrapper]) -> Iterator[None]:
    """Inside, none of them talks to its other ranks because of a backward."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(wrapper.no_sync())
        yield


def average_gradients(wrappers: Sequence[Wrapper]) -> None:
    """Give each parameter the mean of its gradients over the wrapper's ranks.

    All of `.grad` is averaged, as the wrapper does after accumulation. One that no rank has stays
    None; one that some have counts as zero on the others. Collective over each wrapper's group.
    """
    for wrapper in wrappers:
        group = wrapper.process_group
        ignored = wrapper.parameters_to_ignore
        parameters = [
            parameter
            for name, parameter in wrapper.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
        if not parameters:
            continue
        members = dist.get_process_group_ranks(group)
        with peer_failures("a stage was averaging its gradients over ranks {}", members):
            device = parameters[0].device
            has = torch.tensor([float(p.grad is not None) for p in parameters], device=device)
            dist.all_reduce(has, group=group)
            gradients = []
            for parameter, count in zip(parameters, has.tolist(), strict=True):
                if count:
                    if parameter.grad is None:
                        parameter.grad = zero_gradient(parameter)
                    gradients.append(parameter.grad.detach())
            for bucket in _buckets(gradients):
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                dist.all_reduce(flat, group=group)
                flat /= group.size()
                pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
                for gradient, piece in zip(bucket, pieces, strict=True):
                    gradient.copy_(piece.view_as(gradient))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one kind that are summed at once; a larger one alone."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.numel() > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.numel()
        yield bucket
