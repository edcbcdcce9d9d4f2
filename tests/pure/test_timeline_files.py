"""A timeline and a measured window come back from their files; a damaged file is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_usage import HAND, jittered, random_run

from npu_pipe.errors import ConfigError, DataError
from npu_pipe.lowering.evaluation import forward_only
from npu_pipe.simulator.footprint import Footprint
from npu_pipe.simulator.memory import Memory
from npu_pipe.timeline.files import (
    load_timeline,
    save_timeline,
    timeline_from_json,
    timeline_to_json,
)
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.train.window import MeasuredWindow, read_window, write_window

WINDOW = MeasuredWindow(
    step=7,
    prefetch=2,
    layers=((1.0, 2.0), (2.0,)),
    timeline=HAND,
    footprint=Footprint(Memory([8, 9], [1, 2], [3, 4], [5]), (10.0, 11.0), (12.0, 13.0)),
)


@given(st.integers(0, 2**48))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_timeline_comes_back(seed: int) -> None:
    _, predicted = random_run(seed)
    for timeline in (predicted, jittered(predicted, seed)):
        text = json.dumps(timeline_to_json(timeline), allow_nan=False)
        assert timeline_from_json(json.loads(text)) == timeline


def test_files_come_back(tmp_path: Path) -> None:
    save_timeline(HAND, tmp_path / "timeline.json")
    assert load_timeline(tmp_path / "timeline.json") == HAND
    for window in (WINDOW, replace(WINDOW, footprint=None)):
        write_window(window, tmp_path / "window.json")
        assert read_window(tmp_path / "window.json") == window
    with pytest.raises(ConfigError, match="No such file"):
        save_timeline(HAND, tmp_path / "missing" / "timeline.json")


def set_to(section: str, row: int, column: int, value: Any) -> Callable[[Any], None]:
    def damage(data: Any) -> None:
        data[section][row][column] = value

    return damage


def field(name: str, value: Any) -> Callable[[Any], None]:
    def damage(data: Any) -> None:
        data[name] = value

    return damage


def repeat(section: str) -> Callable[[Any], None]:
    def damage(data: Any) -> None:
        data[section].append(list(data[section][-1]))

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (field("format", "npu_pipe.schedule"), 'no "format": "npu_pipe.timeline"'),
        (field("version", 2), "the file has version 2"),
        (field("version", True), "the file has version True"),
        (field("more", 1), "the field 'more' is unknown"),
        (lambda data: data.pop("waits"), "the field 'waits' is missing"),
        (field("compute", {}), "compute is {}, and no list"),
        (field("schedule", 3), "its schedule is wrong"),
        (lambda data: data["schedule"].update(microbatches=9), "its schedule is wrong"),
        (set_to("compute", 0, 0, 2), "compute has [2, '0F0', 0.0, 1000.0]"),
        (set_to("compute", 0, 0, True), "no [rank, name, start, end]"),
        (set_to("compute", 0, 1, "F"), "compute: 'F' is not"),
        (set_to("compute", 0, 1, "0SEND_F0"), "compute has 0SEND_F0 on rank 0"),
        (set_to("compute", 0, 1, "1F0"), "compute has 1F0 on rank 0, where"),
        (set_to("compute", 0, 1, "0F1"), "compute has 0F1 on rank 0, where"),
        (set_to("compute", 0, 1, "9F0"), "compute has 9F0 on rank 0, where"),
        (set_to("compute", 0, 2, float("nan")), "no [rank, name, start, end]"),
        (set_to("compute", 0, 3, float("inf")), "no [rank, name, start, end]"),
        (set_to("compute", 0, 3, -1.0), "no [rank, name, start, end] in order"),
        (set_to("compute", 0, 3, 4500.0), "0B0 begins before"),
        (lambda data: data["compute"].reverse(), "begins before"),
        (set_to("transfers", 0, 1, "0F0"), "transfers has 0F0"),
        (set_to("waits", 0, 1, "0SEND_F0"), "waits has 0SEND_F0"),
        (repeat("transfers"), "transfers has 1SEND_B0 twice"),
        (set_to("phases", 0, 1, "sleep"), "phases has 'sleep'"),
        (set_to("phases", 0, 0, -1), "phases has [-1"),
    ],
)
def test_a_damaged_timeline_is_refused(damage: Callable[[Any], None], words: str) -> None:
    data = json.loads(json.dumps(timeline_to_json(HAND)))
    damage(data)
    with pytest.raises(DataError) as refused:
        timeline_from_json(data)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (field("format", "npu_pipe.timeline"), 'no "format": "npu_pipe.window"'),
        (field("step", 0), "step is 0"),
        (field("prefetch", 1.5), "prefetch is 1.5"),
        (field("layers", [[1]]), "layers has not one list a stage"),
        (field("layers", [[1], []]), "layers has []"),
        (field("layers", [[1], ["2"]]), "layers has '2'"),
        (lambda data: data["timeline"]["compute"].pop(), "1B0 is missing"),
        (lambda data: data["timeline"]["transfers"].pop(), "0RECV_B0 is there without 1SEND_B0"),
        (field("footprint", 3), "its footprint is wrong"),
        (field("footprint", {}), "its footprint is wrong"),
        (lambda data: data["footprint"]["memory"].update(more=1), "its footprint is wrong"),
        (lambda data: data["footprint"]["memory"].update(activation=[1]), "footprint is wrong"),
        (lambda data: data["footprint"].update(held_bytes=[1.0]), "not one value a rank"),
    ],
)
def test_a_damaged_window_is_refused_with_its_path(
    tmp_path: Path, damage: Callable[[Any], None], words: str
) -> None:
    path = tmp_path / "window.json"
    write_window(WINDOW, path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(DataError) as refused:
        read_window(path)
    assert f"{path}: " in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"3"])
def test_what_is_no_window_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "window.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"window\.json: "):
        read_window(path)


def test_an_evaluation_is_no_measured_window(tmp_path: Path) -> None:
    schedule = forward_only(HAND.schedule, 1)
    compute = tuple(span for span in HAND.compute if span.action.kind == "F")
    write_window(replace(WINDOW, timeline=Timeline(schedule, compute)), tmp_path / "window.json")
    with pytest.raises(DataError, match="its schedule has no backwards"):
        read_window(tmp_path / "window.json")


def test_a_timeline_without_its_schedule_is_no_file() -> None:
    empty = Timeline(HAND.schedule, ())
    assert timeline_from_json(timeline_to_json(empty)) == empty
