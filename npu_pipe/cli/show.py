"""`npu-pipe show`: build a schedule, prove it, predict its timeline and draw it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from npu_pipe.cli.common import Count, Output, parse_flags
from npu_pipe.cli.terminal import print_grid
from npu_pipe.errors import ConfigError
from npu_pipe.ir.files import load_schedule, schedule_hash
from npu_pipe.ir.schedule import Schedule
from npu_pipe.ir.text import format_orders
from npu_pipe.lowering.lower import lower
from npu_pipe.schedules.registry import build_schedule
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.program import simulate_program
from npu_pipe.timeline.picture import write_png, write_svg
from npu_pipe.timeline.summary import headline
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.timeline.times import time_scale
from npu_pipe.timeline.trace import write_trace

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class ShowFlags:
    """Build a schedule, prove it, predict its timeline and draw it.

    npu-pipe show 1f1b -p 4 -m 8

    npu-pipe show interleaved-1f1b -p 4 -m 8 -v 2 --transfer 0.1 --svg picture.svg

    npu-pipe show mine.json --trace trace.json
    """

    schedule: Annotated[str, Positional, arg(metavar="SCHEDULE")]
    """Name of a schedule, or a schedule file that ends in .json."""
    ranks: Annotated[Count, arg(aliases=("-p",))] = None
    """Pipeline ranks; a file knows its own."""
    microbatches: Annotated[Count, arg(aliases=("-m",))] = None
    """Microbatches of one update; a file knows its own."""
    chunks: Annotated[Count, arg(aliases=("-v",))] = None
    """Stages a rank, where the schedule leaves a choice."""
    forward: float = 1.0
    """Time of a forward of one stage."""
    input_grad: float = 1.0
    """Time of the input-gradient half of a backward."""
    weight_grad: float = 1.0
    """Time of its weight-gradient half."""
    transfer: float = 0.0
    """Time of one crossing between two ranks."""
    svg: Output = None
    """Write a picture: vector, with hints."""
    png: Output = None
    """Write a picture: pixels; needs matplotlib."""
    trace: Output = None
    """Write a trace that Perfetto and MindStudio Insight open."""
    text: bool = False
    """Print the order of compute of each rank instead of the grid."""
    program: bool = False
    """The same with the transfers: what each rank executes."""
    json: bool = False
    """Print the numbers as JSON instead."""


def run(argv: Sequence[str]) -> int:
    """The verb. Raises UsageError for sizes, files and costs that do not work."""
    flags = parse_flags(ShowFlags, argv, verb="show")
    _check(flags)
    schedule = _schedule(flags)
    costs = Costs.uniform(
        schedule.stages,
        forward=flags.forward,
        input_grad=flags.input_grad,
        weight_grad=flags.weight_grad,
        transfer=flags.transfer,
    )
    program = lower(schedule, costs)
    timeline = simulate_program(program, costs)
    if flags.json:
        print(json.dumps(_numbers(timeline)))
    elif flags.text or flags.program:
        print(format_orders(program.orders if flags.program else schedule.orders))
    else:
        print(headline(schedule) + "\n")
        print_grid(timeline)
        print("\n" + _sentence(timeline))
    for path, write in ((flags.svg, write_svg), (flags.png, write_png), (flags.trace, write_trace)):
        if path is not None:
            write(timeline, path)
            print(f"wrote {path}", file=sys.stderr)
    return 0


def _check(flags: ShowFlags) -> None:
    forms = [form for form in ("text", "program", "json") if getattr(flags, form)]
    if len(forms) > 1:
        raise ConfigError(
            "one thing is printed at a time",
            f"--{' and --'.join(forms)} were given",
            "leave one out",
        )
    paths = [path.resolve() for path in (flags.svg, flags.png, flags.trace) if path is not None]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            "each output has a file of its own", "one path was given twice", "name another"
        )


def _schedule(flags: ShowFlags) -> Schedule:
    sizes = {"ranks": flags.ranks, "microbatches": flags.microbatches, "chunks": flags.chunks}
    if flags.schedule.endswith(".json"):
        given = [f"--{name}" for name, size in sizes.items() if size is not None]
        if given:
            raise ConfigError(
                "a schedule file knows its sizes",
                f"{', '.join(given)} came with {flags.schedule}",
                "leave them out",
            )
        return load_schedule(flags.schedule)
    if flags.ranks is None or flags.microbatches is None:
        raise ConfigError(
            "a schedule is built for a number of ranks and of microbatches",
            f"{flags.schedule} came without {'-p' if flags.ranks is None else '-m'}",
            f"for example: npu-pipe show {flags.schedule} -p 4 -m 8",
        )
    return build_schedule(
        flags.schedule,
        ranks=flags.ranks,
        microbatches=flags.microbatches,
        chunks=flags.chunks,
    )


def _numbers(timeline: Timeline) -> dict[str, object]:
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "sha256": schedule_hash(schedule),
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble_ratio": timeline.bubble_ratio,
        "busy": list(timeline.busy_us),
        "peak_activations": list(timeline.peak_activations),
        "transfers": len(timeline.transfers) // 2,
    }


def _sentence(timeline: Timeline) -> str:
    scale, peaks = time_scale(timeline), timeline.peak_activations
    each = " ".join(map(str, peaks)) if len(peaks) <= 16 else f"{min(peaks)} to {max(peaks)}"
    return (
        f"makespan {scale.text(timeline.makespan)}, span {scale.text(timeline.span)}, "
        f"bubble {timeline.bubble_ratio:.1%}, peak activations per rank {each}, "
        f"{len(timeline.transfers) // 2} transfers"
    )
