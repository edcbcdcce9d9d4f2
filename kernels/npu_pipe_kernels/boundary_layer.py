"""BoundaryLinear: a linear layer at an end of a stage, and where a stage has one."""

from __future__ import annotations

from torch import Tensor, nn

from npu_pipe.comm.port import Port
from npu_pipe.errors import ConfigError
from npu_pipe_kernels.boundary import linear_between, matmul_send, recv_matmul

__all__ = [
    "BoundaryLinear",
    "begins_with_linear",
    "ends_with_linear",
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


def begins_with_linear(stage: nn.Module) -> bool:
    """Whether its input goes to an nn.Linear and nowhere else: in an nn.Sequential, nested or not.

    One with hooks, or of a subclass, may do more with it.
    """
    return _end(stage, 0)


def ends_with_linear(stage: nn.Module) -> bool:
    """Whether its output is that of an nn.Linear, likewise."""
    return _end(stage, -1)


def with_ports(stage: nn.Module, *, before: Port | None, after: Port | None) -> nn.Module:
    """The stage with its first and last linear layer next to these; it shares all parameters, and
    their names, with the one that is given, which stays as it is."""
    if before is None and after is None:
        return stage
    if isinstance(stage, nn.Linear):
        return BoundaryLinear(stage, before=before, after=after)
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
        module: nn.Module | None = stage
        while module is not None:
            if _has_hooks(module):
                raise ConfigError(
                    "where a stage works in tiles there are no hooks: rows have left, or are not "
                    "there yet, when they are called",
                    f"stage {index} has one on its {type(module).__name__}",
                    "register it before `tiled`, which then leaves this layer whole",
                )
            module = module[place] if type(module) is nn.Sequential else None


def _has_hooks(module: nn.Module) -> bool:
    found = (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
    )
    return any(not _is_ours(hook) for hooks in found for hook in hooks.values())


def _is_ours(hook: object) -> bool:
    """The pipeline's own, of its watch of memory: it looks at no row."""
    return str(getattr(hook, "__module__", "")).startswith("npu_pipe.runtime.")


def _end(module: nn.Module, place: int) -> bool:
    if _has_hooks(module):
        return False
    if type(module) is nn.Sequential and len(module):
        return _end(module[place], place)
    return type(module) is nn.Linear
