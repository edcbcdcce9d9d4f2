"""`npu-pipe show`: build a schedule, prove it, predict its timeline and draw it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from npu_pipe.cli.common import Count, Output, parse_flags
from npu_pipe.cli.subject import read_subject
from npu_pipe.cli.terminal import print_grid
from npu_pipe.errors import ConfigError
from npu_pipe.ir.files import is_file_name, schedule_hash
from npu_pipe.ir.program import Program
from npu_pipe.ir.schedule import Schedule
from npu_pipe.ir.text import format_orders
from npu_pipe.lowering.lower import lower
from npu_pipe.schedules.registry import FAMILIES
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.memory import Memory, memory_levels
from npu_pipe.simulator.program import simulate_program
from npu_pipe.timeline.html import Panel
from npu_pipe.timeline.picture import write_html, write_png, write_svg
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

    npu-pipe show 1f1b zb-h1 -p 8 -m 32 --html page.html
    """

    schedules: Annotated[
        tuple[str, ...], Positional, arg(metavar="SCHEDULE ...", help_behavior_hint="")
    ]
    """Name of a schedule, or a .json or .csv file. Several run the model of the first, each cut
    into its own number of stages."""
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
    activation_bytes: float = 0.0
    """Bytes that a forward of one stage keeps for its backward."""
    weight_input_bytes: float = 0.0
    """Bytes that an input-gradient half keeps for its weight-gradient half."""
    parameter_bytes: float = 0.0
    """Bytes of parameters, gradients and optimizer state of one stage."""
    boundary_bytes: float = 0.0
    """Bytes of one crossing between two stages."""
    html: Output = None
    """Write a page: bars that tell what they wait for, and memory, in bytes if those are given."""
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
    subjects = _subjects(flags)
    whole = _schedule(subjects[0]).stages
    panels = []
    for number, subject in enumerate(subjects):
        # Costs are given for the stages of the first: the same model, cut finer, takes less each.
        program, panel = _predict(flags, subject, share=whole / _schedule(subject).stages)
        panels.append(panel)
        if number and not flags.json:
            print()
        _print(flags, program, panel.timeline)
    if flags.html is not None:
        write_html(panels, flags.html)
    for path, write in ((flags.svg, write_svg), (flags.png, write_png), (flags.trace, write_trace)):
        if path is not None:
            write(panels[0].timeline, path)
    for path in filter(None, _outputs(flags)):
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _check(flags: ShowFlags) -> None:
    if not flags.schedules:
        raise ConfigError(
            "show takes at least one SCHEDULE", "none was given", "npu-pipe show 1f1b -p 4 -m 8"
        )
    forms = [form for form in ("text", "program", "json") if getattr(flags, form)]
    if len(forms) > 1:
        raise ConfigError(
            "one thing is printed at a time",
            f"--{' and --'.join(forms)} were given",
            "leave one out",
        )
    single = [form for form in ("text", "program", "svg", "png", "trace") if getattr(flags, form)]
    if len(flags.schedules) > 1 and single:
        raise ConfigError(
            "several schedules are shown on the terminal, by --json and by --html",
            f"--{single[0]} was given with {len(flags.schedules)} schedules",
            "give one schedule, or --html",
        )
    paths = [path.resolve() for path in _outputs(flags) if path is not None]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            "each output has a file of its own", "one path was given twice", "name another"
        )
    sizes = ("ranks", "microbatches", "chunks")
    given = [f"--{name}" for name in sizes if getattr(flags, name) is not None]
    if given and all(map(is_file_name, flags.schedules)):
        raise ConfigError(
            "a schedule file knows its sizes",
            f"{', '.join(given)} came with {flags.schedules[0]}",
            "leave them out",
        )


def _outputs(flags: ShowFlags) -> tuple[Path | None, ...]:
    return flags.html, flags.svg, flags.png, flags.trace


def _subjects(flags: ShowFlags) -> list[Schedule | Program]:
    words = flags.schedules
    flexible = {word for word in words if word in FAMILIES and FAMILIES[word].any_chunks}
    return [
        read_subject(
            word,
            verb="show",
            ranks=flags.ranks,
            microbatches=flags.microbatches,
            chunks=flags.chunks if word in flexible or not flexible else None,
        )
        for word in words
    ]


def _schedule(subject: Schedule | Program) -> Schedule:
    return subject.schedule if isinstance(subject, Program) else subject


def _predict(
    flags: ShowFlags, subject: Schedule | Program, *, share: float
) -> tuple[Program, Panel]:
    """share: how much one of its stages is of a stage that costs are given for."""
    stages = _schedule(subject).stages
    costs = Costs.uniform(
        stages,
        forward=flags.forward * share,
        input_grad=flags.input_grad * share,
        weight_grad=flags.weight_grad * share,
        transfer=flags.transfer,
    )
    program = subject if isinstance(subject, Program) else lower(subject, costs)
    memory = Memory(
        activation=(flags.activation_bytes * share,) * stages,
        weight_inputs=(flags.weight_input_bytes * share,) * stages,
        parameters=(flags.parameter_bytes * share,) * stages,
        boundary=(flags.boundary_bytes,) * (stages - 1),
    )
    given = any((*memory.activation, *memory.weight_inputs, *memory.parameters, *memory.boundary))
    levels = memory_levels(program, memory) if given else None
    return program, Panel(simulate_program(program, costs), levels)


def _print(flags: ShowFlags, program: Program, timeline: Timeline) -> None:
    schedule = program.schedule
    if flags.json:
        print(json.dumps(_numbers(timeline)))
    elif flags.text or flags.program:
        print(format_orders(program.orders if flags.program else schedule.orders))
    else:
        print(headline(schedule) + "\n")
        print_grid(timeline)
        print("\n" + _sentence(timeline))


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
