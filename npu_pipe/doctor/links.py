"""What the links between neighbours say about training. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from npu_pipe.doctor.diagnosis import Link
from npu_pipe.finding import Finding, Verdict

__all__ = ["link_findings"]


def link_findings(links: Sequence[Link], *, ranks: int) -> tuple[Finding, ...]:
    """One for all of them, and one for each that is wrong or slow."""
    if not links:
        why = "one rank has nobody to send to" if ranks == 1 else "no two ranks send to each other"
        return (Finding("transfers", why),)
    found = [Finding("transfers", _told(links))]
    wrong = [link for link in links if not link.is_correct]
    if wrong:
        found.append(
            Finding(
                "transfers",
                f"other bytes arrived than were sent, between {_pairs(wrong)}",
                Verdict.REFUSE,
                "take these hosts or devices out, and have memory, cables and drivers looked at",
            )
        )
    slow = [link for link in links if link.is_slow]
    if slow:
        found.append(
            Finding(
                "transfers",
                f"slow against the median of the links like it: {_pairs(slow)}",
                Verdict.WARN,
                "look for another job, a bad cable, or ranks that are not placed as the mesh says",
            )
        )
    return tuple(found)


def _told(links: Sequence[Link]) -> str:
    kinds = []
    for is_near, where in ((True, "within a host"), (False, "between hosts")):
        kind = [link for link in links if link.is_near == is_near]
        if kind:
            down, up, both = (
                median(getattr(link, way) for link in kind)
                for way in ("down_gb_s", "up_gb_s", "both_gb_s")
            )
            kinds.append(
                f"{len(kind)} {where}: {median(link.latency_us for link in kind):.0f} us, "
                f"{down:.2f} GB/s down, {up:.2f} up, {both:.2f} each with both at once"
            )
    return f"pairs of neighbours, medians: {'; '.join(kinds)}"


def _pairs(links: Sequence[Link]) -> str:
    return ", ".join(f"{link.low}-{link.high}" for link in links[:20])
