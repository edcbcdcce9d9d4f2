"""The last measured window of a run, as a file. Imports no torch.

{"format": "npu_pipe.window", "version": 1, "step": 150, "prefetch": 2, "layers": [[1, 2], [2]],
 "timeline": {"format": "npu_pipe.timeline", ...}, "footprint": {"memory": {...}, ...}}
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from npu_pipe.errors import CostsError, DataError
from npu_pipe.files import write_whole
from npu_pipe.ir.action import Action, flatten
from npu_pipe.ir.program import peer_of
from npu_pipe.simulator.footprint import Footprint
from npu_pipe.simulator.memory import Memory
from npu_pipe.timeline.files import (
    read_json,
    require_fields,
    timeline_from_json,
    timeline_to_json,
)
from npu_pipe.timeline.timeline import Timeline

__all__ = ["MeasuredWindow", "read_window", "write_window"]

VERSION = 1
_FORMAT = "npu_pipe.window"


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """step: the update that it was part of. prefetch: as it was run.

    layers: per stage, what its layers cost, in any unit; of a stage that cannot be cut, one.
    timeline: all of the window, measured. footprint: None if memory was not measured.
    """

    step: int
    prefetch: int
    layers: tuple[tuple[float, ...], ...]
    timeline: Timeline
    footprint: Footprint | None


def write_window(window: MeasuredWindow, path: Path) -> None:
    """Write a file that `read_window` reads. Raises ConfigError when it cannot be written."""
    value = {
        "format": _FORMAT,
        "version": VERSION,
        "step": window.step,
        "prefetch": window.prefetch,
        "layers": window.layers,
        "timeline": timeline_to_json(window.timeline),
        "footprint": asdict(window.footprint) if window.footprint else None,
    }
    write_whole(json.dumps(value, separators=(",", ":")) + "\n", path)


def read_window(path: Path) -> MeasuredWindow:
    """Read and prove a file; raises DataError for whatever is wrong with it."""
    data = read_json(path)
    try:
        return _window(data)
    except DataError as error:
        raise DataError(error.rule, f"{path}: {error.facts}", error.cure) from error


def _window(data: Any) -> MeasuredWindow:
    names = ("format", "version", *(field.name for field in fields(MeasuredWindow)))
    require_fields(data, _FORMAT, VERSION, names)
    timeline = timeline_from_json(data["timeline"])
    _require_whole(timeline)
    for name in ("step", "prefetch"):
        if type(data[name]) is not int or not 1 <= data[name] < 2**31:
            raise _bad(f"{name} is {data[name]!r:.80}, and no whole number of at least 1")
    layers = data["layers"]
    if not isinstance(layers, list) or len(layers) != timeline.schedule.stages:
        raise _bad("layers has not one list a stage")
    return MeasuredWindow(
        step=data["step"],
        prefetch=data["prefetch"],
        layers=tuple(_numbers(held, "layers") for held in layers),
        timeline=timeline,
        footprint=_footprint(data["footprint"], timeline),
    )


def _require_whole(timeline: Timeline) -> None:
    """Every action of a schedule of training, and both ends of every transfer."""
    if not timeline.schedule.training:
        raise _bad("its schedule has no backwards")
    ran = Counter(action for span in timeline.compute for action in flatten(span.action))
    wanted = Counter(
        a for order in timeline.schedule.orders for step in order for a in flatten(step)
    )
    for action in (*(wanted - ran), *(ran - wanted)):
        raise _bad(f"{action} is {'missing' if wanted[action] else 'not in the schedule'}")
    ends = {span.action for span in timeline.transfers if isinstance(span.action, Action)}
    for action in ends:
        if peer_of(action) not in ends:
            raise _bad(f"{action} is there without {peer_of(action)}")


def _footprint(data: Any, timeline: Timeline) -> Footprint | None:
    if data is None:
        return None
    try:
        memory = Memory(**data["memory"])
        memory.check_fits(timeline.schedule)
        held, highest = (_numbers(data[name], name) for name in ("held_bytes", "highest_bytes"))
    except (CostsError, TypeError, KeyError) as error:
        raise _bad(f"its footprint is wrong: {error!s:.200}") from error
    if not len(held) == len(highest) == timeline.schedule.ranks:
        raise _bad("its footprint has not one value a rank")
    return Footprint(memory, held, highest)


def _numbers(values: Any, name: str) -> tuple[float, ...]:
    if not isinstance(values, list) or not values:
        raise _bad(f"{name} has {values!r:.80} for a list of numbers")
    for value in values:
        if type(value) not in (int, float) or not 0 <= value < 1e30:
            raise _bad(f"{name} has {value!r:.80} for a number")
    return tuple(map(float, values))


def _bad(facts: str) -> DataError:
    return DataError(
        "a measured window is JSON as npu-pipe train writes it",
        facts,
        "it was damaged or edited: run it again",
    )
