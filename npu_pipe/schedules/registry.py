"""The schedules by name: one row each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.chimera import chimera
from npu_pipe.schedules.dualpipe import dualpipe
from npu_pipe.schedules.dualpipe_v import dualpipe_v
from npu_pipe.schedules.gpipe import gpipe
from npu_pipe.schedules.interleaved import interleaved_1f1b
from npu_pipe.schedules.interleaved_zb import interleaved_zb
from npu_pipe.schedules.looped_bfs import looped_bfs
from npu_pipe.schedules.one_f_one_b import one_f_one_b
from npu_pipe.schedules.sizes import check_sizes
from npu_pipe.schedules.v_half import v_half
from npu_pipe.schedules.v_min import v_min
from npu_pipe.schedules.zb_h1 import zb_h1
from npu_pipe.schedules.zb_h2 import zb_h2
from npu_pipe.schedules.zb_v import zb_v

__all__ = ["FAMILIES", "Family", "build_if_covered", "build_schedule"]


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the registry.

    build: (ranks, microbatches) or, where `any_chunks`, (ranks, microbatches, chunks).
    chunks: stages a rank, where the caller does not say.
    any_chunks: whether another number may be asked for.
    summary: one line for lists.
    """

    build: Callable[..., Schedule]
    chunks: int
    any_chunks: bool
    summary: str


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpipe": Family(gpipe, 1, False, "all forwards, then all backwards; holds m activations"),
        "1f1b": Family(one_f_one_b, 1, False, "gpipe's time, at most p activations"),
        "interleaved-1f1b": Family(
            interleaved_1f1b, 2, True, "v stages a rank: 1/v of the bubble, v times the transfers"
        ),
        "looped-bfs": Family(
            looped_bfs, 2, True, "gpipe with v stages a rank: 1/v of the bubble, holds m*v"
        ),
        "zb-h1": Family(zb_h1, 1, False, "1f1b with W in its bubble: a third of it, same memory"),
        "zb-h2": Family(
            zb_h2,
            1,
            False,
            "twice zb-h1's memory; its makespan at equal costs, better with slow transfers",
        ),
        "interleaved-zb": Family(
            interleaved_zb, 2, True, "zb-h1 with v stages a rank: 1/v of the bubble, same memory"
        ),
        "zb-v": Family(zb_v, 2, False, "two stages a rank in a V: half of zb-h1's bubble"),
        "v-half": Family(v_half, 2, False, "zb-v in half the memory, some bubble for it"),
        "v-min": Family(
            v_min, 2, False, "zb-v in a third of the memory; costs have to be about equal"
        ),
        "dualpipe": Family(
            dualpipe,
            1,
            False,
            "both ways with fused pairs; parameters twice; p and m even, m >= 2p",
        ),
        "dualpipe-v": Family(
            dualpipe_v, 2, False, "dualpipe with parameters once, in a V; m >= 2p"
        ),
        "chimera": Family(
            chimera, 1, False, "both ways, whole backwards; parameters twice; p even, m a multiple"
        ),
    }
)


def build_schedule(
    name: str, *, ranks: int, microbatches: int, chunks: int | None = None, **options: Any
) -> Schedule:
    """Build a schedule by name.

    chunks: stages a rank; None for the schedule's own number.
    options: the schedule's own, e.g. backward_order=BackwardOrder.FIFO for gpipe.
    Raises ScheduleError for an unknown name and for sizes the rule does not cover.
    """
    family = FAMILIES.get(str(name))
    if family is None:
        begins = [other for other in FAMILIES if name and other.startswith(str(name))]
        close = begins or difflib.get_close_matches(str(name), FAMILIES, n=1, cutoff=0.4)
        raise ScheduleError(
            f"schedules are {', '.join(FAMILIES)}",
            f"{name!r} was asked for",
            f"did you mean {close[0]!r}?" if close else "take one of them",
        )
    chunks = family.chunks if chunks is None else chunks
    check_sizes(ranks, microbatches, chunks=chunks)
    if family.any_chunks:
        return family.build(ranks, microbatches, chunks, **options)
    if chunks != family.chunks:
        flexible = [name for name, family in FAMILIES.items() if family.any_chunks]
        raise ScheduleError(
            f"{name} places {family.chunks} stage{'s' * (family.chunks > 1)} on each rank",
            f"{chunks} were asked for",
            f"leave chunks out, or use one of {', '.join(flexible)}",
        )
    return family.build(ranks, microbatches, **options)


def build_if_covered(
    name: str, *, ranks: int, microbatches: int, chunks: int | None = None
) -> Schedule | None:
    """As `build_schedule`; None for sizes that the rule does not cover."""
    try:
        return build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    except ScheduleError:
        return None
