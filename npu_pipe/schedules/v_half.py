"""V-Half: half of 1F1B's activations, on the V placement. [Qi et al. 2405.15362]

A pattern that repeats every six slots: on rank r the first microbatch has F, f, i and I (small
letters are stage 2p-1-r) in slots 2r, 3p-r-2, 3p+t+2r-1 and 6p+t-r-2, with t = 3 for even p,
else 0. Left as it is, it idles in its warm-up and its cool-down, so there

1. up to the first I of rank 0, actions are pulled into free earlier slots where the peak does not
   rise;
2. from the last F of rank 0 on, a rank runs the earliest of its pattern that is ready, its F in
   the pattern's order and while there is room, and a W where there is none. p = 2, m = 4:

    rank 0   F0 F1 F2 f0 i0 w0 f1 .. I0 i1 W0 f2 w1 F3 I1 i2 w2 f3 i3 I2 w3 I3 W1 W2 W3
    rank 1   .. F0 f0 F1 f1 i0 w0 I0 W0 F2 f2 i1 w1 I1 F3 W1 f3 i2 I2 i3 I3 w2 w3 W2 W3

Every rank holds 2 * floor((p+2)/2) chunks at most. From m = p+2 on the makespan is 6m + 3p-7
chunk times (F = I = W = 1) for even p > 2, 6m + 3p-4 for odd p > 1.
"""

from __future__ import annotations

from itertools import accumulate

from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.needs import needs
from npu_pipe.ir.placement import vee
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.play import Play
from npu_pipe.schedules.v_pattern import Offsets, Row, in_order, pattern_rows

__all__ = ["v_half"]


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank; any number of microbatches."""
    peak = 2 * ((ranks + 2) // 2)
    pattern = pattern_rows(ranks, microbatches, _offsets)
    rows = _pull_warmup(pattern, until=_offsets(ranks, 0)[3], peak=peak)
    return Schedule(
        name="v-half",
        microbatches=microbatches,
        placement=vee(ranks),
        orders=_play_cooldown(rows, microbatches, peak=peak),
    )


def _offsets(p: int, r: int) -> Offsets:
    t = 3 if p % 2 == 0 else 0
    return 2 * r, 3 * p - r - 2, 3 * p + t + 2 * r - 1, 6 * p + t - r - 2


def _pull_warmup(pattern: list[Row], *, until: int, peak: int) -> list[Row]:
    """Each action, in the order of slots, to the first free slot after what it needs; an F only
    as far as its rank has room for one more in all slots that it is pulled over."""
    rows = [list(row) for row in pattern]
    held = [_held(row[:until]) for row in rows]
    ends: dict[Action, int] = {}
    for slot in range(until):
        for row, after in zip(rows, held, strict=True):
            action = row[slot]
            if action is None:
                continue
            first = max((ends[need] for need in needs(action, 2 * len(rows))), default=0)
            if action.kind is Kind.F:
                full = (t for t in range(slot - 1, first - 1, -1) if after[t] >= peak)
                first = next(full, first - 1) + 1
            target = next((t for t in range(first, slot) if row[t] is None), slot)
            row[slot] = None
            row[target] = action
            ends[action] = target + 1
            if change := _change(action):
                after[target:slot] = [count + change for count in after[target:slot]]
    return rows


def _play_cooldown(rows: list[Row], m: int, *, peak: int) -> tuple[tuple[Action, ...], ...]:
    last_stage = 2 * len(rows) - 1
    cut = rows[0].index(Action(Kind.F, 0, m - 1)) + 1
    play = Play(vee(len(rows)), m, begun=[in_order(row[:cut]) for row in rows])
    turn = {action: t for row in rows for t, action in enumerate(row[cut:]) if action}
    forwards = [[action for action in row if action and action.kind is Kind.F] for row in rows]

    def choose(rank: int) -> Action | None:
        near, far = rank, last_stage - rank
        ready = [play.next(Kind.I, far), play.next(Kind.I, near)]
        begun = play.done[Kind.F, near] + play.done[Kind.F, far]
        if begun < 2 * m and play.held[rank] < peak:
            ready.append(play.next(Kind.F, forwards[rank][begun].stage))
        earliest = min(filter(None, ready), key=turn.__getitem__, default=None)
        return earliest or play.next(Kind.W, far) or play.next(Kind.W, near)

    return play.run(choose)


def _held(row: Row) -> list[int]:
    """Activations after each slot."""
    return list(accumulate(_change(action) if action else 0 for action in row))


def _change(action: Action) -> int:
    return (action.kind is Kind.F) - (action.kind is Kind.W)
