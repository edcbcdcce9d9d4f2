"""Tied parameters across ranks: one value from the start, and one gradient after each step.

    stage       0                 3
    copies      embedding.weight  head.weight
    after W     g0                g3
    exchange    g0 ------------->
                  <------------- g3
    .grad       g0 + g3           g0 + g3

Each rank that holds a copy is sent the gradients of the others, and all of them add in the order
of the stages. So the copies stay equal bit by bit, as long as their optimizers are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from npu_pipe.comm.copies import Part, agree_on_parts, copies_here
from npu_pipe.comm.failure import peer_failures
from npu_pipe.comm.handshake import agree, require_equal
from npu_pipe.comm.team import Team
from npu_pipe.errors import ConfigError
from npu_pipe.ir.program import Lane
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.gradients import gradient_dtype, zero_gradient
from npu_pipe.runtime.tied import Tied

__all__ = ["TiedCopies"]


class _Move(NamedTuple):
    """A tensor that one rank sends another: of which tied parameter, and of which part of it."""

    tied: int
    part: int
    source: int
    target: int


class TiedCopies:
    """What a rank does for the tied parameters of its pipeline. Falsy where there are none.

    Parameters are looked up by name each time: a module may be given new ones.
    """

    def __init__(
        self,
        tied: Sequence[Tied],
        modules: Mapping[int, nn.Module],
        *,
        schedule: Schedule,
        team: Team,
    ) -> None:
        """Agree on the copies, and give all of them the value of the first; collective.

        Raises, on every rank alike, ConfigError for copies that do not exist or do not fit, and
        HandshakeError for ranks that disagree.
        """
        self._modules = modules
        self._team = team
        answers = team.meet("tied parameters", lambda: copies_here(tied, modules, schedule))
        self._parts = agree_on_parts(tied, answers, schedule)
        if self._parts:
            with team.unbroken():
                self._give_first_value()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def set_aside(self) -> list[Tensor | None]:
        """Take the gradients that are there before a step away, so that they are not summed.

        Raises HandshakeError, on every rank, where only some copies are frozen.
        """
        if not self._parts:
            return []
        frozen = agree("step", self._frozen, gather=self._team.gather)
        require_equal(frozen, cure="freeze all copies of a tied parameter, or none")
        aside: list[Tensor | None] = []
        for parameter in self._all_own():
            aside.append(parameter.grad)
            parameter.grad = None
        return aside

    def add(self, aside: Sequence[Tensor | None]) -> None:
        """Sum the gradients of this step over the copies, and add what was set aside before.

        A copy without a gradient counts as zero where another has one; where none has, all stay
        without. With replicas, theirs have been added before.
        """
        summed = self._summed()
        gradients = {
            (tied, part): _gradient(parameter)
            for tied in summed
            for part, parameter in self._own(tied).items()
        }
        gradients |= self._exchange(gradients, self._gradient_moves(summed), of=gradient_dtype)
        for tied in summed:
            own = list(self._own(tied).values())
            if own:
                total = gradients[tied, 0] + gradients[tied, 1]
                for part in range(2, len(self._parts[tied])):
                    total += gradients[tied, part]
                for parameter in own:
                    parameter.grad = total if parameter is own[0] else total.clone()
        for parameter, old in zip(self._all_own(), aside, strict=True):
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)

    def repeated(self) -> frozenset[int]:
        """The ids of this rank's parameters that another copy stands for, in a norm over all."""
        return frozenset(
            id(parameter)
            for tied, parts in enumerate(self._parts)
            for part, parameter in self._own(tied).items()
            if part > 0 or parts[part].home != self._team.rank
        )

    def _own(self, tied: int) -> dict[int, nn.Parameter]:
        """The parts that this rank holds."""
        rank = self._team.rank
        return {
            number: self._modules[part.copies[0][0]].get_parameter(part.copies[0][1])
            for number, part in enumerate(self._parts[tied])
            if rank in part.holders
        }

    def _all_own(self) -> list[nn.Parameter]:
        return [p for tied in range(len(self._parts)) for p in self._own(tied).values()]

    def _frozen(self) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for tied, parts in enumerate(self._parts):
            name = f"requires_grad of the tied parameter {_text(parts)}"
            own = {p.requires_grad for p in self._own(tied).values()}
            found[name] = " and ".join(map(str, sorted(own))) or None
            if len(own) > 1:
                raise ConfigError(
                    "all copies of a tied parameter are trained, or none",
                    f"{_text(parts)} is frozen in some of its stages",
                    "freeze all copies of a tied parameter, or none",
                )
        return found

    def _give_first_value(self) -> None:
        first = {
            (tied, 0): self._own(tied)[0].detach()
            for tied, parts in enumerate(self._parts)
            if parts[0].home == self._team.rank
        }
        moves = [
            _Move(tied, 0, parts[0].home, target)
            for tied, parts in enumerate(self._parts)
            for target in _holders(parts)
            if target != parts[0].home
        ]
        values = first | self._exchange(first, moves, of=lambda parameter: parameter.dtype)
        with torch.no_grad():
            for (tied, _), value in values.items():
                for parameter in self._own(tied).values():
                    parameter.copy_(value)

    def _summed(self) -> list[int]:
        """The tied parameters that more than one Parameter stands for, and one has a gradient of;
        the same on all ranks."""
        if not self._parts:
            return []
        own = [
            any(p.grad is not None for p in self._own(t).values()) for t in range(len(self._parts))
        ]
        somewhere = map(any, zip(*self._team.gather(own), strict=True))
        return [t for t, has in enumerate(somewhere) if has and len(self._parts[t]) > 1]

    def _gradient_moves(self, summed: Iterable[int]) -> list[_Move]:
        return [
            _Move(tied, number, part.home, target)
            for tied in summed
            for number, part in enumerate(self._parts[tied])
            for target in _holders(self._parts[tied])
            if target not in part.holders
        ]

    def _exchange(
        self,
        tensors: Mapping[tuple[int, int], Tensor],
        moves: Iterable[_Move],
        *,
        of: Callable[[Tensor], torch.dtype],
    ) -> dict[tuple[int, int], Tensor]:
        """Do the moves that begin or end here; returns what has come, by tied parameter and part.

        of: the dtype of what comes for a parameter. Both ends of a pair of ranks go through the
        moves in one order.
        """
        rank, groups = self._team.rank, self._team.groups
        found: dict[tuple[int, int], Tensor] = {}
        kept = []
        works = []
        with peer_failures(f"rank {rank} was exchanging tied parameters"):
            for tied, part, source, target in moves:
                lane = groups.lane(Lane.DOWN if target > source else Lane.UP)
                if target == rank:
                    like = next(iter(self._own(tied).values()))
                    found[tied, part] = torch.empty(like.shape, dtype=of(like), device=like.device)
                    works.append(lane.recv([found[tied, part]], source, 0))
                elif source == rank:
                    kept.append(tensors[tied, part].contiguous())
                    works.append(lane.send([kept[-1]], target, 0))
            while works:
                works.pop(0).wait()
        return found


def _holders(parts: Iterable[Part]) -> list[int]:
    return sorted(frozenset().union(*(part.holders for part in parts)))


def _text(parts: Iterable[Part]) -> str:
    return " = ".join(f"{stage}:{name}" for part in parts for stage, name in part.copies)


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return zero_gradient(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient
