"""One self-contained page: timelines one above the other, on one scale of time.

    1f1b: 4 ranks, 8 microbatches                     a panel, for each timeline
    rank 0  |F0|F1|F2|F3|      | B0 |F4| B1 |         its bars, painted by the script
            __==########################====          what the rank holds meanwhile
    > Numbers of each rank                            a table, which needs no script

The page loads nothing: styles, script and data are in it, and its policy forbids the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

from npu_pipe.ir.action import Step, flatten
from npu_pipe.timeline.html_data import columns, pack
from npu_pipe.timeline.levels import Levels, Unit, held_activations
from npu_pipe.timeline.palette import KIND_NAMES, Chunks, fill
from npu_pipe.timeline.summary import headline, summary
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.timeline.times import TimeScale, time_scale

__all__ = ["Panel", "html"]

_SCRIPTS = ("data.js", "paint.js", "tip.js", "page.js")


@dataclass(frozen=True, slots=True)
class Panel:
    """A timeline and what its ranks hold meanwhile; levels: None for activations."""

    timeline: Timeline
    levels: Levels | None = None


def html(panels: Sequence[Panel]) -> str:
    """The page as text. Each panel after the first is compared with the first."""
    held = [panel.levels or held_activations(panel.timeline) for panel in panels]
    timelines = [panel.timeline for panel in panels]
    scale = time_scale(max(timelines, key=lambda timeline: timeline.makespan))
    data = {
        "symbol": scale.symbol,
        "kinds": {kind: [name, fill(kind)] for kind, name in KIND_NAMES.items()},
        "panels": [columns(*panel, scale) for panel in zip(timelines, held, strict=True)],
    }
    sections = [
        _section(number, timeline, levels, against=timelines[0] if number else None, scale=scale)
        for number, (timeline, levels) in enumerate(zip(timelines, held, strict=True))
    ]
    return Template(_part("page.html")).substitute(
        title=_text(" | ".join(headline(timeline.schedule) for timeline in timelines)),
        style=_part("page.css"),
        legend="\n".join(_legend(timelines)),
        axis=_text(scale.axis),
        panels="\n".join(sections),
        data=pack(data),
        script="\n".join(map(_part, _SCRIPTS)),
    )


def _section(
    number: int, timeline: Timeline, levels: Levels, *, against: Timeline | None, scale: TimeScale
) -> str:
    name, words = _text(headline(timeline.schedule)), _text(summary(timeline))
    if against is not None and _same_work(timeline, against):
        change = timeline.makespan / against.makespan - 1
        words += f"; against {_text(against.schedule.name)}: makespan {change:+.1%}"
    return f"""<section class="panel" aria-labelledby="name{number}">
<h2 id="name{number}">{name}</h2>
<p class="summary">{words}</p>
<div class="plot" tabindex="0" role="group" aria-label="Actions of {name}. Arrow keys walk \
through them, Enter goes to what one waits for.">
<svg role="img" aria-label="Timeline of {name}: {words}."></svg>
</div>
<details><summary>Numbers of each rank</summary>
{_table(timeline, levels, scale)}
</details>
</section>"""


def _same_work(one: Timeline, other: Timeline) -> bool:
    """Whether their makespans can be compared: as much is computed on as many ranks."""
    works = (sum(one.busy_us), sum(other.busy_us))
    same = one.schedule.ranks == other.schedule.ranks and math.isclose(*works, rel_tol=1e-3)
    return same and other.makespan > 0


def _table(timeline: Timeline, levels: Levels, scale: TimeScale) -> str:
    chunks, peaks = Chunks(timeline.schedule), list(levels.before)
    makespan = timeline.makespan or 1.0
    at: list[Step | None] = [None] * len(peaks)
    for span, held in zip(timeline.compute, levels.during, strict=True):
        if held > peaks[span.rank]:
            peaks[span.rank], at[span.rank] = held, span.action
    rows = [
        (
            str(rank),
            " ".join(map(str, chunks.stages(rank))),
            scale.text(busy),
            f"{1 - busy / makespan:.1%}",
            _amount(levels.unit, peaks[rank]),
            "" if (step := at[rank]) is None else str(step),
        )
        for rank, busy in enumerate(timeline.busy_us)
    ]
    names = ("rank", "stages", "busy", "idle", f"peak {levels.unit}", "first at")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _amount(unit: Unit, value: float) -> str:
    """A level for people: 4, or 1.5 GiB."""
    if unit is Unit.ACTIVATIONS:
        return f"{value:g}"
    for power, name in enumerate(("B", "KiB", "MiB", "GiB")):
        if value < 1024 ** (power + 1):
            return f"{value / 1024**power:.4g} {name}"
    return f"{value / 1024**4:.4g} TiB"


def _legend(timelines: Sequence[Timeline]) -> list[str]:
    used = {
        action.kind
        for each in timelines
        for span in each.compute
        for action in flatten(span.action)
    }
    swatches = [
        (f"background: {fill(kind)}", f"<b>{kind}</b> {name}")
        for kind, name in KIND_NAMES.items()
        if kind in used
    ]
    if any(Chunks(each.schedule).most > 1 for each in timelines):
        swatches.append((f"background: {fill(next(iter(KIND_NAMES)), 1.0)}", "later stage"))
    swatches += [("background: var(--idle)", "idle"), ("background: var(--held)", "memory")]
    return [f'<li><i style="{style}"></i>{text}</li>' for style, text in swatches]


def _part(name: str) -> str:
    return (files("npu_pipe.timeline") / "page" / name).read_text(encoding="utf-8")


def _text(text: str) -> str:
    return escape("".join(letter if letter.isprintable() else " " for letter in text))
