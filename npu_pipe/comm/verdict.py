"""Verdict: who is to blame when nothing moves, from what each rank was last seen at.

A rank that waits is not to blame. One is that says nothing at all; that is at one action for
longer than the time-out; or that has not come to the call in which the others wait. Where all
wait, what they wait for was lost on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from npu_pipe.comm.board import Place, State

__all__ = ["Cause", "Seen", "died", "judge", "left", "table"]

_ALIVE = "every rank stays alive and connected until the job ends"


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank as another one sees it.

    still_s: for how long it has been at the same place. silent_s: since it was last heard of.
    """

    place: Place
    still_s: float
    silent_s: float


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the pipeline failed: the three parts of a PeerError."""

    rule: str
    facts: str
    cure: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def judge(
    rank: int, seen: Mapping[int, Seen], *, timeout_s: float, grace_s: float = 0.0
) -> Cause | None:
    """What `rank` waits for in vain, or None: while it need not wait, or not yet.

    seen: all ranks that have not left. grace_s: on top of the time-out.
    """
    limit_s = timeout_s + grace_s
    mine = seen[rank]
    if not mine.place.waits:
        return None
    blamed: list[tuple[float, int, str]] = []
    for other, each in seen.items():
        if other == rank:
            continue
        is_busy = not each.place.waits and each.place.state != State.OUTSIDE
        if each.silent_s >= limit_s or (is_busy and each.still_s >= limit_s):
            why = f"has been {each.place} for {each.still_s:.1f} s"
            if each.silent_s >= limit_s / 2:  # it was not only at that, it has stopped
                why = f"has not been heard of for {each.silent_s:.1f} s; it was seen {each.place}"
            blamed.append((-each.still_s, other, why))
        elif is_busy or each.place.waits:
            continue
        elif (late_s := min(each.still_s, mine.still_s)) >= limit_s:
            blamed.append((-late_s, other, _absent(each.place, mine.place, late_s)))
    if blamed:
        _, other, why = min(blamed)
        return Cause(
            f"no rank is without progress for {timeout_s:g} s",
            f"rank {other} {why}",
            "look for what holds it up; raise timeout_s if it only is slow",
        )
    everybody = min((each.still_s, other) for other, each in seen.items())
    if everybody[0] >= limit_s and all(each.place.waits for each in seen.values()):
        facts = "; ".join(f"rank {other} is {each.place}" for other, each in seen.items())
        return Cause(
            _ALIVE,
            f"all ranks wait for each other, and none has moved for {everybody[0]:.1f} s: {facts}",
            "look at the network between them; raise timeout_s if a transfer takes that long",
        )
    return None


def died(rank: int, place: Place, *, exact: bool) -> Cause:
    """A rank's connections have ended without a word. exact: whether it was at this place then,
    or some time before."""
    how = "ended or was killed" if place.state == State.OUTSIDE else "was killed"
    seen = "" if exact else "; it was last seen"
    return Cause(
        _ALIVE,
        f"rank {rank} {how} (or its machine was lost){seen} {place}",
        "look at what it printed last, and for a process killed for lack of memory",
    )


def left(rank: int, place: Place) -> Cause:
    """A rank has closed its pipeline, and others go on."""
    return Cause(
        "every rank makes the same calls",
        f"rank {rank} closed its pipeline {place}",
        "let every rank run the same number of steps",
    )


def table(seen: Mapping[int, Seen], size: int) -> str:
    """What each rank is at, what it waits for, from whom, since when."""
    rows = [("rank", "is", "waits for", "from", "since")]
    for rank in range(size):
        if rank not in seen:
            rows.append((str(rank), "gone", "", "", ""))
            continue
        each = seen[rank]
        awaited, source = _awaited(each.place)
        silent = f", silent for {each.silent_s:.1f} s" if each.silent_s > 2 else ""
        rows.append((str(rank), _at(each.place) + silent, awaited, source, f"{each.still_s:.1f} s"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _absent(place: Place, mine: Place, late_s: float) -> str:
    if place.calls < mine.calls:
        return f"has not called {mine.call}: it has been at its own work {place} for {late_s:.1f} s"
    return f"has been at its own work in {place.call} for {late_s:.1f} s"


def _at(place: Place) -> str:
    if place.action is not None:
        return f"{place.action.action} of {place.call}"
    return str(place)


def _awaited(place: Place) -> tuple[str, str]:
    if place.exchanges % 2:
        return "rows", "those that share its layers"
    if place.action is not None and place.action.source is not None:
        return ("input" if place.action.action.kind == "F" else "gradient"), (
            f"rank {place.action.source}"
        )
    return ("the others", "all ranks") if place.waits else ("", "")
