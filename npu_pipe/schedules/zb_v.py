"""ZB-V: zb-h2's span in zb-h1's memory, on the V placement. [Qi et al. 2401.10241, 2405.15362]

Rank r holds stages r (capitals) and 2p-1-r (small letters); p = 2, m = 3:

    rank 0   F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 ..
    rank 1   .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2

With m >= 2p-1 it has a closed form: span 6m, makespan 6m + p-1 chunk times (F = I = W = 1).
Fewer microbatches leave holes in that, so they are played slot by slot; p = 3, m = 3:

    rank 0   F0 F1 F2 .. .. f0 i0 f1 i1 f2 i2 I0 w0 I1 w1 I2 w2 W0 W1 W2
    rank 1   .. F0 F1 F2 f0 .. f1 i0 f2 i1 I0 i2 I1 w0 I2 w1 w2 W0 W1 W2
    rank 2   .. .. F0 f0 F1 f1 F2 f2 i0 I0 i1 I1 i2 I2 w0 w1 w2 W0 W1 W2

Played, in all cases tried up to p = 40, the makespan is

    max(6m + p-1, 5m + 2p-1, 4m + 3p-1, 2m + 4p-1)

and nothing on this placement is faster. For the last rank has 6m actions to run and the first F can
be there at p-1; the first rank has 5m to run once the first f can be there, at 2p-1; the last
rank 4m from the first i on, at 3p-1; the first rank 2m from the first I on, at 4p-1.
Every rank holds min(2p, 2m) chunks at most.
"""

from __future__ import annotations

from itertools import chain, repeat

from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.placement import vee
from npu_pipe.ir.schedule import Schedule
from npu_pipe.schedules.pattern import actions, in_step
from npu_pipe.schedules.play import Play

__all__ = ["zb_v"]


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank; any number of microbatches."""
    build = _long if microbatches >= 2 * ranks - 1 else _short
    return Schedule(
        name="zb-v",
        microbatches=microbatches,
        placement=vee(ranks),
        orders=build(ranks, microbatches),
    )


def _long(p: int, m: int) -> tuple[tuple[Action, ...], ...]:
    def order(r: int) -> tuple[Action, ...]:
        (fa, ia, wa), (fz, iz, wz) = (
            [actions(kind, stage, range(m)) for kind in (Kind.F, Kind.I, Kind.W)]
            for stage in (r, 2 * p - 1 - r)
        )
        fill, turn = 2 * (p - r) - 1, p - r  # F before the first f; rounds of f i w
        more = chain(fa[fill + r :], repeat(None))
        return (
            *fa[:fill],
            *in_step(fz[:r], fa[fill:]),
            *in_step(fz[r:p], iz[:turn], wz[:turn]),
            *in_step(more, ia, wa, fz[p:], iz[turn:], wz[turn:]),
            *in_step(ia[m - p : m - turn], iz[m - r :]),
            *in_step(ia[m - turn :], wa[m - p :]),
            *wz[m - r :],
            *wa[m - r :],
        )

    return tuple(map(order, range(p)))


def _short(p: int, m: int) -> tuple[tuple[Action, ...], ...]:
    play = Play(vee(p), m, begun=[()] * p)

    def choose(r: int) -> Action | None:
        """f before F before I before i before W; a W first where an F lacks room for it."""
        a, z = r, 2 * p - 1 - r
        may_go_down = play.done[Kind.F, z] or play.done[Kind.F, a] < 2 * (p - r) - 1
        forward = play.next(Kind.F, z) or (play.next(Kind.F, a) if may_go_down else None)
        if forward and play.held[r] < 2 * p:
            return forward
        late = play.next(Kind.W, z) or play.next(Kind.W, a)
        if forward and late:
            return late
        return play.next(Kind.I, a) or play.next(Kind.I, z) or late

    return play.run(choose)
