"""Sums: what is added to a rank's gradients when the windows of a step have run.

In this order: the mean over the ranks of each DistributedDataParallel (`wrapped`) or fully_shard
(`sharded`), the other replica's of a mirrored schedule (`replicas`), and those of tied copies
(`tied`). Each gives all that have a parameter the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from npu_pipe.comm.replicas import add_replica, set_aside
from npu_pipe.comm.sharded import kept_whole, reduce_gradients, sharded_in
from npu_pipe.comm.team import Team
from npu_pipe.comm.tied import TiedCopies
from npu_pipe.comm.wrapped import average_gradients, kept_still, wrappers_in
from npu_pipe.errors import ConfigError

__all__ = ["Before", "Sums"]


class Before(NamedTuple):
    """The gradients that were there before a step, and are not exchanged again."""

    tied: list[Tensor | None]
    mirrored: list[Tensor | None]


class Sums:
    """Of one rank. False where a step has nothing to add."""

    def __init__(
        self, stages: Mapping[int, nn.Module], *, mirrored: bool, tied: TiedCopies, team: Team
    ) -> None:
        """mirrored: whether the schedule keeps two replicas. Raises ConfigError for a wrapper
        that cannot be served."""
        self._stages = dict(stages)
        self._mirrored = mirrored
        self._tied = tied
        self._team = team
        self._wrappers = wrappers_in(stages.values())
        self._sharded = sharded_in(stages.values())

    def __bool__(self) -> bool:
        return any((self._mirrored, self._tied, self._wrappers, self._sharded))

    def set_aside(self) -> Before:
        """Before the first window.

        Raises ConfigError where gradients that are to be summed are collected in `main_grad`, of
        which autograd knows nothing.
        """
        if self:
            self._require_plain()
        tied = self._tied.set_aside()
        return Before(tied, set_aside(self._stages) if self._mirrored else [])

    def _require_plain(self) -> None:
        for stage, module in self._stages.items():
            for name, parameter in module.named_parameters():
                if getattr(parameter, "main_grad", None) is not None:
                    raise ConfigError(
                        "gradients that a pipeline sums over ranks are collected in .grad",
                        f"{name} of stage {stage} has a main_grad",
                        "set its grad_dtype to torch.float32 instead, which sums in float32 too",
                    )

    @contextmanager
    def during_windows(self) -> Iterator[None]:
        with kept_still(self._wrappers), kept_whole(self._sharded):
            yield

    def add(self, before: Before, *, finish: Callable[[], None]) -> None:
        """After the last window. finish: waits for the transfers of this rank."""
        # Not as a part of this pipeline's call: it is other pipelines that are waited for.
        average_gradients(self._wrappers)
        reduce_gradients(self._sharded)
        with self._team.unbroken():
            if self._mirrored:
                add_replica(self._stages, before.mirrored, groups=self._team.groups)
            self._tied.add(before.tied)
            finish()
