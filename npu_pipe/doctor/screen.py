"""A diagnosis on one screen, for a person."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from npu_pipe.doctor.columns import INDENT, columns, some
from npu_pipe.doctor.diagnosis import Diagnosis, Link, told_ranks
from npu_pipe.finding import Finding, Verdict
from npu_pipe.launch.mesh import Axis

__all__ = ["lines", "print_diagnosis"]

_WIDTH = 110  # of files and pipes
_NAME = 10
_MOST_ROWS = 8  # of a table: the first, and those that are worth it
_MARKS = {Verdict.OK: " ", Verdict.WARN: "!", Verdict.REFUSE: "x"}
_STYLES = {Verdict.OK: "", Verdict.WARN: "yellow", Verdict.REFUSE: "bold red"}


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """On stdout, as wide as the terminal; in colour there."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    for text, verdict in lines(diagnosis, width=console.width):
        console.print(Text(text, style=_STYLES[verdict]), no_wrap=True, crop=False)


def lines(diagnosis: Diagnosis, *, width: int) -> Iterator[tuple[str, Verdict]]:
    """The lines of the screen, and how serious each is."""
    seen: dict[str, Finding] = {}
    for finding in diagnosis.findings:
        first = seen.setdefault(finding.name, finding)
        is_fine = finding.verdict is first.verdict is Verdict.OK
        if is_fine and first is not finding and first.ranks != finding.ranks:
            continue  # the same thing on another host; --json tells
        yield from _finding(diagnosis, finding, width)
        if finding.name == "mesh":
            yield from ((line, Verdict.OK) for line in _mesh(diagnosis))
        if finding.name == "transfers" and first is finding:
            yield from _links(diagnosis)
    yield "", Verdict.OK
    yield _verdict(diagnosis)


def _finding(diagnosis: Diagnosis, finding: Finding, width: int) -> Iterator[tuple[str, Verdict]]:
    head = f"{_MARKS[finding.verdict]} {finding.name:<{_NAME}} "
    is_common = finding.verdict is Verdict.OK or len(finding.ranks) in (0, diagnosis.mesh.size)
    where = "" if is_common else f"{told_ranks(finding.ranks)}: "
    cure = f"; {finding.cure}" if finding.cure else ""
    for number, part in enumerate(f"{where}{finding.facts}{cure}".splitlines()):
        yield from (
            (line, finding.verdict)
            for line in textwrap.wrap(
                part,
                max(width, 60),
                initial_indent=head if number == 0 else " " * len(head),
                subsequent_indent=" " * len(head),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


def _mesh(diagnosis: Diagnosis) -> Iterator[str]:
    mesh = diagnosis.mesh
    head = ("rank", "host", "device", "(dp, pp, tp)", "stages", *(axis.value for axis in Axis))
    shown = range(mesh.size)[:_MOST_ROWS]
    rows = []
    for rank in shown:
        at = mesh.coordinates(rank)
        facts = diagnosis.facts[rank] if diagnosis.facts else None
        rows.append(
            (
                str(rank),
                facts.host if facts else "?",
                facts.device if facts else "?",
                f"({at.dp}, {at.pp}, {at.tp})",
                " ".join(map(str, diagnosis.stages[at.pp])),
                *(some(mesh.ranks(axis, rank)) for axis in Axis),
            )
        )
    yield from columns(head, rows)
    if len(shown) < mesh.size:
        yield f"{'':{INDENT}}... and {mesh.size - len(shown)} more (--json has all)"


def _links(diagnosis: Diagnosis) -> Iterator[tuple[str, Verdict]]:
    links = diagnosis.links
    if not links:
        return
    bad = [link for link in links if link.is_slow or not link.is_correct]
    fine = [link for link in links if link not in bad]
    shown = sorted((*bad[: 2 * _MOST_ROWS], *fine[: max(_MOST_ROWS - len(bad), 2)]), key=_by_ranks)
    head = ("ranks", "latency us", "down GB/s", "up GB/s", "both GB/s", "bytes", "")
    rows = [
        (
            f"{link.low}-{link.high}",
            f"{link.latency_us:.0f}",
            f"{link.down_gb_s:.2f}",
            f"{link.up_gb_s:.2f}",
            f"{link.both_gb_s:.2f}",
            "right" if link.is_correct else "WRONG",
            "slow" if link.is_slow else "",
        )
        for link in shown
    ]
    serious = {True: Verdict.WARN, False: Verdict.OK}
    verdicts = [Verdict.OK] + [
        Verdict.REFUSE if not link.is_correct else serious[link.is_slow] for link in shown
    ]
    yield from zip(columns(head, rows), verdicts, strict=True)
    if len(shown) < len(links):
        yield f"{'':{INDENT}}... and {len(links) - len(shown)} more (--json has all)", Verdict.OK


def _by_ranks(link: Link) -> tuple[int, int]:
    return link.low, link.high


def _verdict(diagnosis: Diagnosis) -> tuple[str, Verdict]:
    counts = {
        verdict: sum(finding.verdict is verdict for finding in diagnosis.findings)
        for verdict in Verdict
    }
    told = [
        f"{count} {name}{'s' * (count > 1)}"
        for count, name in (
            (counts[Verdict.REFUSE], "problem"),
            (counts[Verdict.WARN], "warning"),
        )
        if count
    ]
    worst = next(v for v in (Verdict.REFUSE, Verdict.WARN, Verdict.OK) if counts[v] or v == "ok")
    text = "training may start" if diagnosis.may_start else "training may not start"
    return f"{text}{': ' * bool(told)}{', '.join(told)}", worst
