"""What crosses a boundary: the value that one stage returns and the next is called with.

Any nesting of tuples, lists and dicts (a pytree) of tensors and of None, bool, int, float or
str. Tensors travel as they are; all else is part of the value's `Meta`: see `form` for how both
ends come to know it. A tuple or list becomes the next stage's positional arguments, any other
value its only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from npu_pipe.errors import DataError

__all__ = [
    "DTYPES",
    "Constant",
    "Meta",
    "TensorMeta",
    "arguments",
    "flatten_local",
    "flatten_value",
]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
_CROSSING = frozenset(DTYPES.values())

Constant: TypeAlias = bool | int | float | str | None


class TensorMeta(NamedTuple):  # what is made and compared with each transfer is a tuple
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {self.shape}{' with gradient' if self.needs_grad else ''}"


class Meta(NamedTuple):
    """The form of a value: its nesting, and per leaf a tensor's form or what it is.

    nesting: as text, where it crosses; else torch's own TreeSpec.
    leaves: TensorMeta or Constant; of a value that does not cross, anything.
    """

    nesting: Any
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[TensorMeta, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMeta))

    @property
    def gradients(self) -> tuple[TensorMeta, ...]:
        """The tensors for which a gradient comes back, in order."""
        return tuple(leaf for leaf in self.tensors if leaf.needs_grad)

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """Build the value from its tensors."""
        if self.nesting == _LEAF:
            return tensors[0] if tensors else self.leaves[0]
        if len(tensors) == len(self.leaves) and self.nesting == _tuple_nesting(len(tensors)):
            return tuple(tensors)
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, TensorMeta) else leaf for leaf in self.leaves]
        spec = _spec(self.nesting) if isinstance(self.nesting, str) else self.nesting
        return pytree.tree_unflatten(leaves, spec)


def flatten_value(value: Any, stage: int) -> tuple[Meta, list[Tensor]]:
    """Take the output of a stage apart. Raises DataError for what cannot cross."""
    if isinstance(value, Tensor) and _can_cross(value):  # most are
        leaf = TensorMeta(tuple(value.shape), value.dtype, value.requires_grad)
        return Meta(_LEAF, (leaf,)), [value]
    if isinstance(value, tuple):
        value = tuple(value)  # a namedtuple is arguments to the next stage, as any tuple is
    if type(value) is tuple and all(isinstance(x, Tensor) and _can_cross(x) for x in value):
        flat = [TensorMeta(tuple(x.shape), x.dtype, x.requires_grad) for x in value]
        return Meta(_tuple_nesting(len(flat)), tuple(flat)), list(value)
    found, spec = pytree.tree_flatten(value)
    leaves: list[TensorMeta | Constant] = []
    tensors = []
    for leaf in found:
        if isinstance(leaf, Tensor) and _can_cross(leaf):
            leaves.append(TensorMeta(tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
            tensors.append(leaf)
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            leaves.append(leaf)
        else:
            is_tensor = isinstance(leaf, Tensor)
            kind = ""
            if is_tensor:
                layout = "nested" if leaf.is_nested else leaf.layout
                kind = f"{layout} tensor of {leaf.dtype} on {leaf.device}"
            raise _cannot_cross(
                f"the output of stage {stage} holds a {kind or type(leaf).__name__}"
            )
    return Meta(_nesting(spec, stage), tuple(leaves)), tensors


def flatten_local(value: Any) -> tuple[Meta, list[Tensor]]:
    """Take a value apart that stays on its rank, and so may hold anything."""
    if isinstance(value, Tensor):
        return Meta(_LEAF, (TensorMeta(tuple(value.shape), value.dtype, False),)), [value]
    found, spec = pytree.tree_flatten(value)
    tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
    leaves = (
        TensorMeta(tuple(leaf.shape), leaf.dtype, False) if isinstance(leaf, Tensor) else leaf
        for leaf in found
    )
    return Meta(spec, tuple(leaves)), tensors


def arguments(value: Any) -> tuple[Any, ...]:
    """The positional arguments a stage is called with."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _can_cross(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and tensor.dtype in _CROSSING and not tensor.is_meta


@lru_cache(maxsize=256)
def _text(spec: pytree.TreeSpec) -> str | None:
    """The nesting as text, from which the other end builds it again; None if it cannot."""
    try:
        text = pytree.treespec_dumps(spec)
        return text if pytree.treespec_loads(text) == spec else None
    except (TypeError, ValueError, NotImplementedError):  # torch has no text for this type, says it
        return None


@lru_cache(maxsize=256)
def _tuple_nesting(count: int) -> str:
    """Of a plain tuple of so many leaves, which most nestings are."""
    return pytree.treespec_dumps(pytree.tree_structure((None,) * count))


@lru_cache(maxsize=256)
def _spec(text: str) -> pytree.TreeSpec:
    return pytree.treespec_loads(text)


def _nesting(spec: pytree.TreeSpec, stage: int) -> str:
    text = _text(spec)
    if text is not None:
        return text
    raise _cannot_cross(
        f"the output of stage {stage} is nested as {str(spec).removeprefix('TreeSpec'):.200}"
    )


def _cannot_cross(facts: str) -> DataError:
    return DataError(
        "tuples, lists and dicts (by text or number) of dense tensors, None, bool, int, float and "
        "str cross stages",
        facts,
        "return it in one of these forms, or keep it inside its stage",
    )


_LEAF = pytree.treespec_dumps(pytree.tree_structure(None))  # the nesting of a single leaf
