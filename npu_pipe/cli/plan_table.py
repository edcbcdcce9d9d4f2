"""A comparison as a table and sentences, for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from npu_pipe.cli.table import make_table, open_console, print_text
from npu_pipe.planner.assess import Assessment
from npu_pipe.planner.candidates import Refusal
from npu_pipe.planner.comparison import Comparison
from npu_pipe.planner.robustness import JITTER, SLOW_LINK, SLOW_RANK
from npu_pipe.planner.searched import Searched

__all__ = ["print_comparison"]


def print_comparison(comparison: Comparison) -> None:
    """On stdout, as wide as the terminal."""
    console = open_console()
    console.print(_table(comparison))
    console.print()
    for line in _legend(comparison):
        print_text(console, line, style="dim")
    if comparison.searched is not None:
        console.print()
        print_text(console, _search(comparison.searched))
    if comparison.unsearched is not None:
        console.print()
        print_text(console, f"not searched: {comparison.unsearched}")
    advice = comparison.advice
    console.print()
    print_text(console, advice.reason, style="bold")
    for sentence in (*comparison.worth.sentences, *advice.notes):
        print_text(console, f"- {sentence}", hang="  ")
    if comparison.refused:
        console.print()
    for reason, names in _refusals(comparison.refused).items():
        print_text(console, f"{', '.join(names)}: {reason}", style="dim")


def _refusals(refused: Iterable[Refusal]) -> dict[str, list[str]]:
    """The schedules of each reason and cure."""
    names: dict[str, list[str]] = {}
    for refusal in refused:
        cure = refusal.error.cure.partition(", or schedule ")[0]  # all of those are above
        names.setdefault(f"{refusal.error.facts}; {cure}", []).append(refusal.name)
    return names


def _table(comparison: Comparison) -> Table:
    has_bytes = any(row.peaks for row in comparison.rows)
    unit = comparison.rows[0].scale.symbol
    names = [f"makespan\n{unit}", f"span\n{unit}", "bubble", "held"]
    names += ["held\nGB"] if has_bytes else []
    names += ["trans-\nfers", "copies", "jitter", "slow\nlink", "slow\nrank"]
    table = make_table(words=("", "schedule"), numbers=names)
    for row in comparison.rows:
        table.add_row(*_cells(comparison, row, has_bytes=has_bytes), style=_style(comparison, row))
    return table


def _cells(comparison: Comparison, row: Assessment, *, has_bytes: bool) -> list[str]:
    scale = comparison.rows[0].scale
    is_over = comparison.limits.broken_by(row) is not None
    cells = [
        ">" if row is comparison.advice.chosen else "!" if is_over else "",
        row.name,
        scale.number(row.makespan),
        scale.number(row.span),
        f"{row.bubble_ratio:.1%}",
        f"{row.held:.4g}",
    ]
    if has_bytes:
        cells.append(f"{(row.held_bytes or 0.0) / 1e9:.3g}")
    return [
        *cells,
        str(max(row.transfers.values(), default=0)),
        str(row.copies),
        *(f"{round(loss, 3) + 0.0:.1%}" for loss in row.losses),
    ]


def _style(comparison: Comparison, row: Assessment) -> str:
    if row is comparison.advice.chosen:
        return "bold green"
    return "dim" if comparison.limits.broken_by(row) is not None else ""


def _legend(comparison: Comparison) -> list[str]:
    lines = [
        "held: activations of a rank's whole share, on the fullest rank; transfers: over the "
        "busiest link;",
        f"longer under jitter of {JITTER:.0%}, one link {SLOW_LINK:.0%} of a forward slower, one "
        f"rank {SLOW_RANK:.0%} slower (mean of up to {comparison.samples})",
    ]
    if any(comparison.limits.broken_by(row) for row in comparison.rows):
        lines.append("!: over the limits")
    return lines


def _search(searched: Searched) -> str:
    found, scale = searched.found, searched.row.scale
    low, high = min(searched.caps), max(searched.caps)
    caps = f"{low}" if low == high else f"{low} to {high}"
    among = " with one order of the microbatches" if found.is_uneven else ""
    state = f"proved best{among}" if found.proved else f"gap {found.gap:.1%}"
    return (
        f"searched, with one stage a rank and at most {caps} activation{'s' * (high > 1)}: "
        f"makespan {scale.text(found.makespan)}, bound {scale.text(found.lower_bound)}, "
        f"{state}, {found.seconds:.1f} s"
    )
