"""Measuring what a rank holds: each tensor that an action makes is counted until it is freed.

live   ___/--F0--\\__/--F1--\\___           sampled where actions begin and end; what lies between
          ^      ^  ^      ^              two samples shows in `highest` only

This is for one window now and then: it takes some microseconds for each operation of torch. It
counts what torch allocates, of whatever kind, and so leans on no rule of ours. What is received
is made by the link, between actions: it does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from npu_pipe.ir.action import Action, Kind
from npu_pipe.runtime.record import Recorder, now_us

__all__ = ["AllocatedBytes", "MemoryRecorder", "StageBytes", "watch_memory"]


_CAST = torch.ops.aten._to_copy.default


class AllocatedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside it, `live` is the size of all storages that were made while `counts` and still are;
    `highest` the most that `live` has been since it was last reset."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = False
        self.live = 0
        self.highest = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}  # storage -> bytes, 0 if older
        self._copies: dict[int, weakref.ref[Any]] = {}  # parameter -> storage of its latest cast

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, is_new=False)
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor, is_new=True)
        if function is _CAST and isinstance(args[0], nn.Parameter):
            self._copies[id(args[0])] = weakref.ref(result.untyped_storage())
        return result

    def size_of(self, tensor: Tensor) -> int:
        """The bytes of its storage if they are counted in `live`."""
        return self._known.get(tensor.untyped_storage()._cdata, (None, 0))[1]

    def copies_of(self, module: nn.Module) -> int:
        """The bytes of its parameters' copies in another dtype, as autocast keeps them."""
        refs = (self._copies.get(id(parameter)) for parameter in module.parameters())
        copies = (ref() for ref in refs if ref is not None)
        return sum(copy.nbytes() for copy in copies if copy is not None)

    def _note(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if is_new and self.counts else 0

        def forget(_: Any) -> None:
            self.live -= self._known.pop(key)[1]

        self._known[key] = (weakref.ref(storage, forget), size)
        self.live += size
        self.highest = max(self.highest, self.live)


class StageBytes(NamedTuple):
    """Of one stage, for one microbatch: what its forward keeps, and what its I keeps until W; its
    output; its parameters with their gradients, and the copies of them that autocast keeps."""

    kept: float
    kept_for_weights: float
    output: float
    parameters: float


class _Sample(NamedTuple):
    action: Action
    before: int
    after: int


@dataclass
class MemoryRecorder(Recorder):
    """A recorder of one window that samples the counter where actions begin and end.

    sizes: per stage, the bytes of its inputs that get a gradient, and of its output.
    """

    counter: AllocatedBytes
    modules: Mapping[int, nn.Module]
    sizes: Mapping[int, tuple[int, int]]
    highest: int = 0
    held: int = 0
    _samples: list[_Sample] = field(default_factory=list)
    _before: int = 0
    _copies: dict[int, int] = field(default_factory=dict)  # by stage, in bytes

    def __post_init__(self) -> None:
        super().__init__()

    def begin(self, _action: Action, /) -> float:
        self._before = self._sample()
        self.counter.counts = True
        return now_us()

    def add(self, action: Action, start_us: float, end_us: float) -> None:
        super().add(action, start_us, end_us)
        if action.kind.is_compute:
            self.counter.counts = False
            self._samples.append(_Sample(action, self._before, self._sample()))
            stage = action.stage  # when an action has ended, copies for a single use are gone
            self._copies[stage] = self.counter.copies_of(self.modules[stage])

    def stages(self) -> dict[int, StageBytes]:
        """Per stage of this rank, the medians over its microbatches."""
        return {stage: self._stage(stage, module) for stage, module in self.modules.items()}

    @property
    def parameters(self) -> int:
        return sum(map(_parameter_bytes, self.modules.values()))

    def _sample(self) -> int:
        """What is live beside gradients of parameters, which are made once and stay."""
        gradients = {
            id(grad): self.counter.size_of(grad)
            for module in self.modules.values()
            for grad in _tensors([p.grad for p in module.parameters()])
        }
        made = sum(gradients.values())
        live = self.counter.live - made
        self.held = max(self.held, live)
        self.highest = max(self.highest, self.counter.highest - made)
        self.counter.highest = self.counter.live
        return live

    def _stage(self, stage: int, module: nn.Module) -> StageBytes:
        gradient, output = self.sizes.get(stage, (0, 0))
        freed = {kind: self._freed(stage, kind) for kind in (Kind.B, Kind.I, Kind.W)}
        for_weights = freed[Kind.W]
        gone = freed[Kind.B] or freed[Kind.I] + for_weights
        return StageBytes(
            kept=max(gone + gradient, 0.0),  # which its backward has made meanwhile
            kept_for_weights=max(for_weights, 0.0),
            output=output,
            parameters=_parameter_bytes(module) + self._copies.get(stage, 0),
        )

    def _freed(self, stage: int, kind: Kind) -> float:
        found = [
            sample.before - sample.after
            for sample in self._samples
            if sample.action.kind is kind and sample.action.stage == stage
        ]
        return median(found) if found else 0.0


@contextmanager
def watch_memory(modules: Mapping[int, nn.Module]) -> Iterator[Callable[[], MemoryRecorder]]:
    """Count in the block. What it gives makes the recorder of each window that is run there."""
    sizes: dict[int, tuple[int, int]] = {}

    def noting(stage: int) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            del module
            gradient = sum(tensor.nbytes for tensor in _tensors(args) if tensor.requires_grad)
            sizes[stage] = (gradient, sum(tensor.nbytes for tensor in _tensors(output)))

        return note

    hooks = [m.register_forward_hook(noting(stage)) for stage, m in modules.items()]
    try:
        with AllocatedBytes() as counter:
            yield partial(MemoryRecorder, counter, modules, sizes)
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(value: Any) -> list[Tensor]:
    """Those with a storage of their own: a sparse one consists of others, which are seen too."""
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _parameter_bytes(module: nn.Module) -> int:
    """With a gradient for each that is trained."""
    return sum(p.nbytes * (1 + p.requires_grad) for p in module.parameters())
