"""What a rank gives to one call of step or eval, and how it is cut into microbatches.

Cut by torch's own rules: tensors along the dimension of their chunk spec, dimension 0 without
one, in pieces that differ by one row at most (torch.tensor_split); all else goes into each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks
from torch.utils import _pytree as pytree

from npu_pipe.errors import DataError
from npu_pipe.pipeline import Microbatches
from npu_pipe.torch_api.whole import Whole

__all__ = ["Given", "Part", "Target", "cut"]


@dataclass(frozen=True, slots=True)
class Given:
    """One rank's arguments of one call, by torch's names."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    arg_mbs: list[Any] | None
    kwarg_mbs: list[Any] | None
    target_mbs: list[Any] | None
    loss_kwargs: Mapping[str, Any] | None

    @property
    def has_target(self) -> bool:
        return self.target is not None or self.target_mbs is not None


class Target(NamedTuple):
    """What a loss function is called with beside the output: the target of one microbatch, and
    the keyword arguments of all. `keep` takes what it gave."""

    target: Any
    keywords: Mapping[str, Any]
    keep: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank takes of a call.

    wholes: what of it wants a gradient. losses: filled with what the loss function gives, by
    microbatch.
    """

    microbatches: Microbatches
    wholes: Sequence[Whole]
    losses: dict[int, Any]


def cut(
    given: Given,
    microbatches: int,
    *,
    first: bool,
    last: bool,
    backward: bool,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
) -> Part:
    """What this rank takes of it: the inputs if `first`, the targets if `last` and given.

    Raises DataError for what cannot be cut, or is given both whole and cut already.
    """
    _require_one_way(given)
    arg_mbs = _require_cut(given.arg_mbs, microbatches, "arg_mbs")
    kwarg_mbs = _require_cut(given.kwarg_mbs, microbatches, "kwarg_mbs")
    target_mbs = _require_cut(given.target_mbs, microbatches, "target_mbs")
    args = given.args if first else ()
    wholes: list[Whole] = []
    losses: dict[int, Any] = {}
    if args or given.kwargs:
        args_cut, kwargs_cut = _split(
            args,
            given.kwargs,
            microbatches,
            args_chunk_spec if args else None,
            kwargs_chunk_spec if given.kwargs else None,
        )
        if backward:
            wholes += _wholes((args, dict(given.kwargs)), zip(args_cut, kwargs_cut, strict=True))
        arg_mbs = args_cut if args else arg_mbs
        kwarg_mbs = kwargs_cut if given.kwargs else kwarg_mbs
    if first and arg_mbs is None:
        if kwarg_mbs is None:
            raise DataError(
                "the rank of the first stage gives the inputs",
                "it was called without any",
                "give the batch, arg_mbs or keyword arguments",
            )
        arg_mbs = [()] * microbatches
    targets: list[Target] | None = None
    if last and given.has_target:
        if target_mbs is None:
            pieces = _split((given.target,), {}, microbatches, None, None)[0]
            target_mbs = [target for (target,) in pieces]
            if backward:
                wholes += _wholes(given.target, target_mbs)
        targets = [
            Target(target, given.loss_kwargs or {}, partial(losses.__setitem__, index))
            for index, target in enumerate(target_mbs)
        ]
    inputs = arg_mbs if first else None
    return Part(Microbatches(inputs, targets, kwarg_mbs), wholes, losses)


def _wholes(value: Any, cut: Iterable[Any]) -> list[Whole]:
    """The tensors of a value that want a gradient. Their pieces are made to want one."""
    pieces = [pytree.tree_leaves(piece) for piece in cut]
    found = []
    for place, leaf in enumerate(pytree.tree_leaves(value)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            own = [leaves[place].requires_grad_() for leaves in pieces]
            found.append(Whole(leaf, own))
    return found


def _split(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    microbatches: int,
    args_chunk_spec: tuple[TensorChunkSpec, ...] | None,
    kwargs_chunk_spec: dict[str, TensorChunkSpec] | None,
) -> tuple[list[Any], list[Any]]:
    args, named = pytree.tree_map_only(Tensor, Tensor.detach, (args, dict(kwargs)))
    try:
        found = split_args_kwargs_into_chunks(
            args, named, microbatches, args_chunk_spec, kwargs_chunk_spec
        )
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        raise DataError(
            "tensors are cut along a dimension that they have, as their chunk specs say",
            " ".join(str(error).split()) or type(error).__name__,
            "give tensors of (batch, ...), or a chunk spec for each argument",
        ) from error
    if len(found[0]) != microbatches:
        raise DataError(
            "each microbatch has at least one row",
            f"a tensor has {len(found[0])} rows for {microbatches} microbatches",
            "give a larger batch, or fewer microbatches",
        )
    # `data`, not `detach`: a stage that works on its input in place must not make autograd
    # believe that it has changed the other microbatches.
    args_cut, kwargs_cut = pytree.tree_map_only(Tensor, lambda piece: piece.data, found)
    return args_cut, kwargs_cut


def _require_one_way(given: Given) -> None:
    pairs = (
        (bool(given.args), given.arg_mbs, "positional arguments", "arg_mbs"),
        (bool(given.kwargs), given.kwarg_mbs, "keyword arguments", "kwarg_mbs"),
        (given.target is not None, given.target_mbs, "target", "target_mbs"),
    )
    for whole, cut, what, name in pairs:
        if whole and cut is not None:
            raise DataError(
                "a batch is given whole or cut already, not both",
                f"{what} and {name} were given",
                "give one of them",
            )


def _require_cut(cut: Sequence[Any] | None, microbatches: int, name: str) -> list[Any] | None:
    if cut is None:
        return None
    if not isinstance(cut, list | tuple):
        raise DataError(
            f"{name} is a list with one value a microbatch",
            f"it is a {type(cut).__name__}",
            "give a list",
        )
    if len(cut) != microbatches:
        raise DataError(
            f"{name} is a list with one value a microbatch",
            f"it has {len(cut)} for {microbatches} microbatches",
            f"give {microbatches}",
        )
    return list(cut)
