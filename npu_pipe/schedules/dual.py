"""The eight steps that DualPipe and DualPipeV share. [deepseek-ai/DualPipe]

A rank holds two stages, one for each of two streams of microbatches that meet it from opposite
sides: stream 0 comes from where the microbatches enter, stream 1 from the turn of the V, or from
the other half of the ranks. `ahead` counts the ranks between this one and the turn or the middle,
`depth` those from the entry up to and with this one:

    1  F0                      2 * ahead times
    2  F0 F1                   depth times
    3  I1 W1 F1                ahead times
    4  (F0&B1) (F1&B0)         steady times; where ahead is 0, the first F0&B1 as two actions
    5  B1 (F1&B0)              ahead times
    6  B1 B0                   depth times; the second half of these as I, their W put off
    7  W I0                    ahead times
    8  W                       depth times

F&B is a fused pair. W that were put off run first in first out.
"""

from __future__ import annotations

from collections import deque

from npu_pipe.ir.action import Action, FusedPair, Kind, Step

__all__ = ["dual_order"]


def dual_order(
    stages: tuple[int, int],
    microbatches: tuple[range, range],
    *,
    ahead: int,
    depth: int,
    steady: int,
) -> tuple[Step, ...]:
    """One rank's order. stages, microbatches: of the two streams."""
    numbers = {kind: tuple(map(iter, microbatches)) for kind in (Kind.F, Kind.B)}
    steps: list[Step] = []
    waiting: deque[Action] = deque()

    def take(kind: Kind, stream: int) -> Action:
        return Action(kind, stages[stream], next(numbers[kind][stream]))

    def forward(stream: int) -> None:
        steps.append(take(Kind.F, stream))

    def backward(stream: int) -> None:
        steps.append(take(Kind.B, stream))

    def split_backward(stream: int) -> None:
        _, stage, microbatch = take(Kind.B, stream)
        steps.append(Action(Kind.I, stage, microbatch))
        waiting.append(Action(Kind.W, stage, microbatch))

    def weight_grad() -> None:
        steps.append(waiting.popleft())

    def pair(one: int, other: int) -> None:
        steps.append(FusedPair(take(Kind.F, one), take(Kind.B, other)))

    for _ in range(2 * ahead):
        forward(0)
    for _ in range(depth):
        forward(0)
        forward(1)
    for _ in range(ahead):
        split_backward(1)
        weight_grad()
        forward(1)
    for turn in range(steady):
        if turn == 0 and ahead == 0:
            forward(0)
            backward(1)
        else:
            pair(0, 1)
        pair(1, 0)
    for _ in range(ahead):
        backward(1)
        pair(1, 0)
    for turn in range(2 * depth):
        (backward if turn < depth else split_backward)(1 - turn % 2)
    for _ in range(ahead):
        weight_grad()
        split_backward(0)
    for _ in range(depth):
        weight_grad()
    return tuple(steps)
