"""Stages that are sharded by fully_shard: gathered and reduced once a step.

By itself it gathers the parameters for each backward, and reduces the gradients after it: m times.
So it is kept still while windows run, with what it offers for accumulation, and told to reduce
after them. Parameters stay whole between the backwards of a step, as in torch's own pipelining.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import nn

__all__ = ["Sharded", "kept_whole", "reduce_gradients", "sharded_in"]


@runtime_checkable
class Sharded(Protocol):
    """What is used of torch's FSDPModule, which takes long to import for all who have none."""

    def set_is_last_backward(self, is_last_backward: bool) -> None: ...

    def set_requires_gradient_sync(self, requires_sync: bool, *, recurse: bool) -> None: ...

    def set_reshard_after_backward(self, reshard: bool, *, recurse: bool) -> None: ...

    def _get_fsdp_state(self) -> Any: ...


def sharded_in(modules: Iterable[nn.Module]) -> list[Sharded]:
    """Those in, or around, the modules of stages."""
    return [part for module in modules for part in module.modules() if isinstance(part, Sharded)]


@contextmanager
def kept_whole(sharded: Sequence[Sharded]) -> Iterator[None]:
    """Inside, a backward reduces no gradients, and drops no parameters."""
    _set(sharded, last=False)
    try:
        yield
    finally:
        _set(sharded, last=True)


def reduce_gradients(sharded: Sequence[Sharded]) -> None:
    """Add the gradients of this step to `.grad`, averaged over the ranks that share them."""
    # All parts of one root have this in common. What ends a backward does it, in all versions.
    states = [module._get_fsdp_state() for module in sharded]
    for state in {id(each._state_ctx): each for each in states}.values():
        state._root_post_backward_final_callback()


def _set(sharded: Sequence[Sharded], *, last: bool) -> None:
    for module in sharded:
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_reshard_after_backward(last, recurse=False)
