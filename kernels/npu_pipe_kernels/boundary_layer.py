"""BoundaryLinear: a linear layer at an end of a stage, and where a stage has one.

Sequential ( ... , Linear )            its product's rows leave as they are made
Sequential ( ... , Block )             and those of a sum, where the block says how it ends:
                                       see `EndsWithSum`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from torch import Tensor, nn
from torch.nn.modules import module as every_module

from npu_pipe.comm.port import Port
from npu_pipe.errors import ConfigError
from npu_pipe_kernels.boundary import linear_between, matmul_send, recv_matmul

__all__ = [
    "BoundaryLinear",
    "Ends",
    "EndsWithSum",
    "ends_of",
    "require_no_hooks",
    "with_ports",
]


class BoundaryLinear(nn.Module):
    """The layer that it is made of, with the same parameters, next to one boundary or two."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, *, before: Port | None, after: Port | None) -> None:
        super().__init__()
        self._parameters = layer._parameters  # one that is replaced in the layer is so here too
        self.before = before
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None and self.after is not None:
            return linear_between(x, self.weight, self.bias, before=self.before, after=self.after)
        if self.before is not None:
            return recv_matmul(x, self.weight, self.bias, self.before)
        assert self.after is not None
        return matmul_send(x, self.weight, self.bias, self.after)


@runtime_checkable
class EndsWithSum(Protocol):
    """A module whose output is residual + last_linear()(rows), as that of a transformer block."""

    def last_linear(self) -> nn.Linear | None:
        """A layer of its own; None where it ends otherwise, as one that recomputes does."""
        ...

    def before_last(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """(residual, rows) of what the module is called with."""
        ...


class _BoundarySum(nn.Module):
    """The module that it is made of, likewise."""

    def __init__(self, module: Any, *, after: Port) -> None:
        super().__init__()
        self._modules = module._modules
        self._parameters, self._buffers = module._parameters, module._buffers
        self._given = (module,)  # no child of this one: its names would be there twice
        self.after = after

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        residual, rows = self.before_last(*args, **kwargs)
        last = self.last_linear()
        return matmul_send(rows, last.weight, last.bias, self.after, residual)

    def last_linear(self) -> nn.Linear:
        found: nn.Linear = self._given[0].last_linear()
        return found

    def before_last(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._given[0].before_last(*args, **kwargs)
        return found

    def train(self, mode: bool = True) -> _BoundarySum:
        self._given[0].train(mode)
        return super().train(mode)


class Ends(NamedTuple):
    """Of a stage: the layers whose products are next to its boundaries, if there are such."""

    before: nn.Linear | None
    after: nn.Linear | None


def ends_of(stage: nn.Module) -> Ends:
    """before: what its input goes to, and nowhere else: in an nn.Sequential, nested or not. after:
    what gives its output, likewise, or the last term of it.

    A layer with hooks, or of a subclass, may do more than its product.
    """
    return Ends(_linear_at(stage, 0), _linear_at(stage, -1))


def with_ports(stage: nn.Module, *, before: Port | None, after: Port | None) -> nn.Module:
    """The stage with its first and last linear layer next to these; it shares all parameters, and
    their names, with the one that is given, which stays as it is."""
    if before is None and after is None:
        return stage
    if isinstance(stage, nn.Linear):
        return BoundaryLinear(stage, before=before, after=after)
    if isinstance(stage, EndsWithSum):
        assert after is not None
        return _BoundarySum(stage, after=after).train(stage.training)
    children = dict(stage._modules)
    first, last = next(iter(children)), next(reversed(children))
    found = nn.Sequential()
    for name, child in children.items():
        assert child is not None
        own = before if name == first else None, after if name == last else None
        found.add_module(name, with_ports(child, before=own[0], after=own[1]))
    return found.train(stage.training)


def require_no_hooks(index: int, stage: nn.Module, *, before: bool, after: bool) -> None:
    """Raises ConfigError for a hook on what the rows of a stage go through at these ends, that was
    registered too late: it would see rows that are not there yet, and change rows that have left.
    """
    for place in (*([0] if before else []), *([-1] if after else [])):
        for module in _passed(stage, place):
            if _has_hooks(module):
                raise ConfigError(
                    "where a stage works in tiles there are no hooks: rows have left, or are not "
                    "there yet, when they are called",
                    f"stage {index} has one on its {type(module).__name__}",
                    "register it before `tiled`, which then leaves this layer whole",
                )


def _linear_at(stage: nn.Module, place: int) -> nn.Linear | None:
    passed = list(_passed(stage, place))
    last = passed[-1]
    is_open = type(last) is nn.Linear and not any(map(_has_hooks, passed))
    return cast(nn.Linear, last) if is_open else None


def _passed(module: nn.Module, place: int) -> Iterator[nn.Module]:
    """What the rows go through at this end, from the outside to the last one that is known."""
    yield module
    if type(module) is nn.Sequential and len(module):
        yield from _passed(module[place], place)
    elif place == -1 and isinstance(module, EndsWithSum):
        last = module.last_linear()
        if last is not None:
            around = (each for each in module.modules() if last in set(each.modules()))
            yield from (each for each in around if each is not module)


def _has_hooks(module: nn.Module) -> bool:
    """Of its own, or one that is called for every module."""
    found = (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
        *(every_module._global_forward_hooks, every_module._global_forward_pre_hooks),
        *(every_module._global_backward_hooks, every_module._global_backward_pre_hooks),
    )
    return any(not _is_ours(hook) for hooks in found for hook in hooks.values())


def _is_ours(hook: object) -> bool:
    """The pipeline's own, of its watch of memory: it looks at no row."""
    return str(getattr(hook, "__module__", "")).startswith("npu_pipe.runtime.")
