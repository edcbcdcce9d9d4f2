"""Trial: send between two ranks over both lanes, and see how fast it is and what arrives.

    latency   a -> b -> a -> b ...         half of a round, a word each way
    down, up  a -> -> -> -> b, then back   one lane at a time
    both      a <=> b                      both lanes at once, one way of it

It goes the way of training: the same link, groups, streams and buffers. Each pair of ranks has
two stages of a made-up schedule, so that what goes to the higher rank is an activation, and what
comes back a gradient of its form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor

from npu_pipe.comm.team import Team
from npu_pipe.comm.team_link import TeamLink
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.boundary import flatten_value
from npu_pipe.runtime.record import now_us

__all__ = ["Amounts", "Trial", "better", "mark_slow", "try_pairs"]

_SLOW = 2.0  # times the median's bandwidth
_LATE = 3.0  # times the median's latency
_LATE_US = 100.0  # what a busy host adds now and then
_TOPIC = 1 << 24  # of the words that end a measurement, apart from those of forms


@dataclass(frozen=True, slots=True)
class Amounts:
    """words: of `word_bytes`, for the latency; messages: of `message_bytes`, for the bandwidth.
    Each is measured `repeats` times, and the best one counts."""

    words: int = 30
    word_bytes: int = 64
    messages: int = 4
    message_bytes: int = 1 << 22
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """What two ranks found. Bandwidths are bytes a microsecond one way.

    is_correct: whether every byte that was looked at arrived as it was sent. is_near: both ranks
    are on one host. is_slow: it lags behind the others of its kind, see `mark_slow`.
    """

    low: int
    high: int
    latency_us: float
    down: float
    up: float
    both: float
    is_correct: bool
    is_near: bool
    is_slow: bool = False


_DEFAULT = Amounts()
_Way: TypeAlias = Callable[[Tensor, Tensor | None], None]
"""What to send, and what to look for in what comes; None for not to look."""
_Seen: TypeAlias = tuple[Sequence[Sequence[float]], bool]
"""By one end: us of each repeat of rounds, down, up and both; and whether all bytes were right."""


def try_pairs(
    team: Team,
    link: TeamLink,
    pairs: Sequence[tuple[int, int]],
    *,
    place: torch.device,
    hosts: Sequence[str],
    amounts: Amounts = _DEFAULT,
) -> tuple[Trial, ...]:
    """Try one pair of ranks after another; collective, and the same value on every rank.

    pairs: low < high. place: where this rank's tensors are. hosts: of each rank.
    Raises PeerError when a rank fails meanwhile.
    """
    schedule = Schedule(
        name="trial",
        microbatches=max(amounts.words, amounts.messages) + 1,
        placement=tuple(rank for pair in pairs for rank in pair),
        orders=((),) * team.size,
    )
    mine: dict[int, _Seen] = {}
    for number, pair in enumerate(pairs):
        with team.unbroken():
            if team.rank in pair:
                end = _End(team, link, schedule, number, place=place, amounts=amounts)
                mine[number] = end.measure()
                link.finish()
        team.gather(None)  # the next pair has the host for itself
    everything = team.gather({str(number): found for number, found in mine.items()})
    return tuple(
        _joined(pair, [everything[rank][str(number)] for rank in pair], hosts, amounts)
        for number, pair in enumerate(pairs)
    )


def better(trials: Sequence[Trial], others: Sequence[Trial]) -> tuple[Trial, ...]:
    """Of pairs that were tried twice, the best of both; none may be wrong."""
    second = {(trial.low, trial.high): trial for trial in others}
    return tuple(_best(trial, second.get((trial.low, trial.high), trial)) for trial in trials)


def _best(one: Trial, other: Trial) -> Trial:
    return replace(
        one,
        latency_us=min(one.latency_us, other.latency_us),
        down=max(one.down, other.down),
        up=max(one.up, other.up),
        both=max(one.both, other.both),
        is_correct=one.is_correct and other.is_correct,
    )


def mark_slow(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Mark those that are slow against the median of their kind: on one host, or between two."""
    return tuple(replace(trial, is_slow=_is_slow(trial, trials)) for trial in trials)


def _is_slow(trial: Trial, trials: Sequence[Trial]) -> bool:
    kind = [each for each in trials if each.is_near == trial.is_near]
    if len(kind) < 3:  # of two, nobody can say which is as it should be
        return False
    latency = median(each.latency_us for each in kind)
    return trial.latency_us > max(_LATE * latency, latency + _LATE_US) or any(
        getattr(trial, way) * _SLOW < median(getattr(each, way) for each in kind)
        for way in ("down", "up", "both")
    )


def _joined(
    pair: tuple[int, int], ends: Sequence[_Seen], hosts: Sequence[str], amounts: Amounts
) -> Trial:
    """What both ends saw. The longer time counts: one may begin before the other looks at its
    clock."""
    low, high = pair
    round_us, *ways_us = (
        min(map(max, *times)) for times in zip(*(times for times, _ in ends), strict=True)
    )
    down, up, both = (amounts.messages * amounts.message_bytes / way_us for way_us in ways_us)
    return Trial(
        low=low,
        high=high,
        latency_us=round_us / amounts.words / 2,
        down=down,
        up=up,
        both=both,
        is_correct=all(is_correct for _, is_correct in ends),
        is_near=hosts[low] == hosts[high],
    )


class _End:
    """One rank's part in the trial of a pair."""

    def __init__(
        self,
        team: Team,
        link: TeamLink,
        schedule: Schedule,
        number: int,
        *,
        place: torch.device,
        amounts: Amounts,
    ) -> None:
        self._team = team
        self._link = link
        self._schedule = schedule
        self._place = place
        self._amounts = amounts
        self._number = number
        first = 2 * number
        self._is_low = schedule.placement[first] == team.rank
        self._peer = schedule.placement[first + 1 if self._is_low else first]
        if self._is_low:
            self._stage, self._gives, self._takes = first, Kind.SEND_F, Kind.RECV_B
        else:
            self._stage, self._gives, self._takes = first + 1, Kind.SEND_B, Kind.RECV_F
        self._is_correct = True
        self._signatures = 0

    def measure(self) -> _Seen:
        ways: tuple[_Way, ...] = (self._down, self._up, self._both)
        rounds = self._repeat(self._amounts.word_bytes, self._rounds)
        times = (rounds, *(self._repeat(self._amounts.message_bytes, way) for way in ways))
        return times, self._is_correct

    def _repeat(self, size_bytes: int, way: _Way) -> list[float]:
        """How long it took each time, in us; then once more, looking at every byte, which takes
        time of its own."""
        self._signatures += 1
        signature = f"{size_bytes} bytes, {self._signatures}"
        signatures = [signature] * self._schedule.microbatches
        self._link.start_window(self._schedule, signatures, self._link.recorder())
        message, wanted = (
            _pattern(size_bytes, rank=rank).to(self._place)
            for rank in (self._team.rank, self._peer)
        )
        self._exchange(message, wanted)
        times = []
        for _ in range(self._amounts.repeats):
            self._meet()
            start_us = now_us()
            way(message, None)
            self._link.finish()
            self._meet()
            times.append(now_us() - start_us)
        way(message, wanted)
        self._link.finish()
        return times

    def _exchange(self, message: Tensor, wanted: Tensor) -> None:
        """Once each way; from here on both know the form."""
        if self._is_low:
            self._send(message, 0)
            self._take(0, wanted)
        else:
            self._take(0, wanted)
            self._send(message, 0)
        self._link.finish()

    def _rounds(self, message: Tensor, wanted: Tensor | None) -> None:
        for index in range(1, self._amounts.words + 1):
            if self._is_low:
                self._send(message, index)
                self._take(index, wanted)
            else:
                self._take(index, wanted)
                self._send(message, index)

    def _down(self, message: Tensor, wanted: Tensor | None) -> None:
        self._one_way(message, wanted, gives=self._is_low)

    def _up(self, message: Tensor, wanted: Tensor | None) -> None:
        self._one_way(message, wanted, gives=not self._is_low)

    def _one_way(self, message: Tensor, wanted: Tensor | None, *, gives: bool) -> None:
        for index in range(1, self._amounts.messages + 1):
            if gives:
                self._send(message, index)
            else:
                self._take(index, wanted)

    def _both(self, message: Tensor, wanted: Tensor | None) -> None:
        numbers = range(1, self._amounts.messages + 1)
        for index in numbers:
            self._link.post(Action(self._takes, self._stage, index))
        for index in numbers:
            self._send(message, index, ends=False)
        for index in numbers:
            self._take(index, wanted, posts=False)
        for index in numbers:
            self._link.ended(Action(self._gives, self._stage, index))

    def _send(self, message: Tensor, index: int, *, ends: bool = True) -> None:
        send = Action(self._gives, self._stage, index)
        meta, _ = flatten_value(message.requires_grad_(), self._stage)
        self._link.send(send, (meta, [message.detach()]))
        if ends:
            self._link.ended(send)

    def _take(self, index: int, wanted: Tensor | None, *, posts: bool = True) -> None:
        receive = Action(self._takes, self._stage, index)
        if posts:
            self._link.post(receive)
        _, (found,) = self._link.take(receive)
        if wanted is not None:
            self._is_correct &= _is_equal(found, wanted)
        self._link.release(receive)

    def _meet(self) -> None:
        control, topic = self._team.control, _TOPIC + self._number
        control.tell(self._peer, "here", topic=topic)
        control.hear(self._peer, topic=topic)
        control.finish()


def _is_equal(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found, wanted)


def _pattern(size_bytes: int, *, rank: int) -> Tensor:
    """Numbers that no other rank sends, and of which no two in a row are the same."""
    return (torch.arange(size_bytes // 4, device="cpu") * 31 + rank * 7919).remainder(65521).float()
