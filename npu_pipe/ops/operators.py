"""Operators: the fused products of one group of ranks, whoever does them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torch import Tensor

from npu_pipe.ops.choose import Choice, choose, pick, table
from npu_pipe.ops.collectives import block_rows, require_joined
from npu_pipe.ops.need import Need, Operator
from npu_pipe.ops.provider import Provider
from npu_pipe.ops.ranks import Ranks

__all__ = ["Operators"]

_LOG = logging.getLogger(__name__)
_KEPT = 1024  # choices: a batch may have a new length every time


class Operators:
    """What the layers of a tensor-parallel group call.

    Every rank makes the same calls in the same order, also in I and W: they run one program. With
    one rank there is nothing to fuse, and the products are plain.
    """

    def __init__(
        self, ranks: Ranks, providers: Sequence[Provider], *, wanted: str | None = None
    ) -> None:
        """providers: in the order of preference. wanted: the name of the only one to use; then a
        product that it cannot serve raises ConfigError. Raises ConfigError for no such name."""
        self.ranks = ranks
        self._providers = pick(providers, wanted)
        self._choices: dict[Need, Choice] = {}
        self._told: set[tuple[str, str]] = set()

    def product(
        self, operator: Operator | None, x_mk: Tensor, right_kc: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The product, and the rows that it is of: those of all ranks, or x as it is.

        operator: None for a plain product, without a transfer. Raises DataError where n does not
        divide m of a matmul_reduce_scatter, and PeerError where this rank has left the others.
        """
        ranks = self.ranks
        if operator is None or ranks.size == 1:
            return x_mk.mm(right_kc), x_mk
        require_joined(ranks)
        if operator is Operator.MATMUL_REDUCE_SCATTER:
            block_rows(x_mk.shape[0], ranks)
        rows, depth = x_mk.shape
        need = Need(operator, rows, depth, right_kc.shape[1], x_mk.dtype)
        provider = self._choose(need).provider
        if operator is Operator.ALL_GATHER_MATMUL:
            return provider.all_gather_matmul(x_mk, right_kc, ranks)
        if operator is Operator.MATMUL_REDUCE_SCATTER:
            return provider.matmul_reduce_scatter(x_mk, right_kc, ranks), x_mk
        return provider.matmul_all_reduce(x_mk, right_kc, ranks), x_mk

    def all_gather_matmul(self, x_mk: Tensor, right_kc: Tensor) -> tuple[Tensor, Tensor]:
        """((n*m, c), and the rows of all ranks: (n*m, k))"""
        return self.product(Operator.ALL_GATHER_MATMUL, x_mk, right_kc)

    def matmul_reduce_scatter(self, x_mk: Tensor, right_kc: Tensor) -> Tensor:
        """(m / n, c)"""
        return self.product(Operator.MATMUL_REDUCE_SCATTER, x_mk, right_kc)[0]

    def matmul_all_reduce(self, x_mk: Tensor, right_kc: Tensor) -> Tensor:
        """(m, c)"""
        return self.product(Operator.MATMUL_ALL_REDUCE, x_mk, right_kc)[0]

    def plan(self, needs: Iterable[Need]) -> tuple[Choice, ...]:
        """Who will serve these, before anything runs; nobody has to where there is one rank. Raises
        ConfigError where the only one that was asked for cannot."""
        if self.ranks.size == 1:
            return ()
        return tuple(self._choose(need) for need in needs)

    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """(product, provider, why not another) of what was planned or run, for preflight; the
        latest of them, where lengths change all the time."""
        return table(self._choices.values())

    def _choose(self, need: Need) -> Choice:
        found = self._choices.get(need)
        if found is None:
            if len(self._choices) == _KEPT:
                del self._choices[next(iter(self._choices))]
            found = self._choices[need] = choose(need, self._providers, self.ranks)
            self._tell(found)
        return found

    def _tell(self, choice: Choice) -> None:
        """Once a reason. That a provider is for another device is no news."""
        for name, why in choice.refused:
            if (name, why.rule) not in self._told and self._is_for_us(name):
                self._told.add((name, why.rule))
                _LOG.warning(
                    "%s is done by provider %s, not %s: %s",
                    *(choice.need, choice.provider.name, name),
                    f"{why.rule}; {why.facts}; {why.cure}",
                )

    def _is_for_us(self, name: str) -> bool:
        kinds = {each.name: each.kind for each in self._providers}
        return kinds[name] in (None, self.ranks.place.type)
