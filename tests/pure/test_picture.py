"""Pictures show every bar where it belongs, and read well in grey and in small."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from npu_pipe import (
    Action,
    Costs,
    FusedPair,
    Kind,
    Schedule,
    Timeline,
    build_schedule,
    lower,
    simulate,
)
from npu_pipe.errors import ConfigError
from npu_pipe.timeline.layout import lay_out
from npu_pipe.timeline.palette import IDLE, fill, ink
from npu_pipe.timeline.picture import draw_svg, write_png, write_svg
from npu_pipe.timeline.shapes import Box, Label, Line, text_width
from npu_pipe.timeline.shares import shares
from npu_pipe.timeline.times import time_scale

SVG = "{http://www.w3.org/2000/svg}"


def predicted(name: str, ranks: int, microbatches: int, **costs: float) -> Timeline:
    schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
    times = Costs.uniform(schedule.stages, **costs)
    return simulate(lower(schedule, times), times)


def bars_of(timeline: Timeline) -> list[Box]:
    return [s for s in lay_out(timeline).shapes if isinstance(s, Box) and s.hint]


def labels_of(timeline: Timeline) -> list[Label]:
    return [s for s in lay_out(timeline).shapes if isinstance(s, Label)]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def lightness(colour: str) -> float:
    """L* of a colour, 0 to 100: what remains of it in grey."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    y = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * y ** (1 / 3) - 16


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_bars_lie_where_their_spans_are(name: str) -> None:
    timeline = predicted(name, 4, 8, transfer=0.25)
    bars = bars_of(timeline)
    assert len(bars) == len(timeline.compute)
    first = next(span for span in timeline.compute if span.start_us == 0)
    x0 = bars[timeline.compute.index(first)].x
    scale = (max(b.x + b.width for b in bars) - x0 + 0.5) / timeline.makespan
    rows = sorted({bar.y for bar in bars})
    for bar, span in zip(bars, timeline.compute, strict=True):
        assert bar.x - x0 == pytest.approx(span.start_us * scale, abs=0.6)
        assert bar.width == pytest.approx((span.end_us - span.start_us) * scale, abs=1.1)
        assert bar.y == rows[span.rank]
        assert bar.hint.startswith(f"{span.action} on rank {span.rank}: ")


def test_the_svg_is_well_formed_and_each_bar_has_a_hint() -> None:
    timeline = predicted("1f1b", 4, 8)
    root = ET.fromstring(draw_svg(timeline))
    hints = [title.text for rect in root.iter(f"{SVG}rect") for title in rect.iter(f"{SVG}title")]
    assert hints[0] == "0F0 on rank 0: 0 to 1, lasts 1"
    assert len(hints) == len(timeline.compute)
    assert root.find(f"{SVG}title").text == "1f1b: 4 ranks, 8 microbatches"  # type: ignore[union-attr]
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"


def test_names_are_escaped_and_control_characters_dropped() -> None:
    nasty = 'a <b> & "c" \x00\x1b[31m'
    assert texts(draw_svg(predicted("1f1b", 2, 2), title=nasty))[0] == 'a <b> & "c"   [31m'


def test_a_picture_says_makespan_bubble_and_peak_and_has_axis_and_legend() -> None:
    words = texts(draw_svg(predicted("1f1b", 4, 8, transfer=0.1)))
    assert words[1] == "makespan 34.6, bubble 30.6%, peak activations 4"
    for word in ("rank 0", "rank 3", "time (units of the costs)", "F forward", "B backward"):
        assert word in words
    for word in ("idle", "transfer down", "transfer up", "0", "5", "30"):
        assert word in words
    assert "idle 30.6%, peak 1" in words


def test_measured_times_are_shown_in_a_sensible_unit() -> None:
    timeline = predicted("1f1b", 4, 8, forward=130.0, input_grad=150.0, weight_grad=120.0)
    assert time_scale(timeline).symbol == "ms"
    assert time_scale(timeline).text(13250.0) == "13.25 ms"
    assert "time (ms)" in texts(draw_svg(timeline))
    seconds = predicted("1f1b", 4, 8, forward=2e5, input_grad=2e5, weight_grad=2e5)
    assert "makespan 6.6 s" in texts(draw_svg(seconds))[1]
    assert time_scale(predicted("1f1b", 4, 8)).symbol == ""


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_at_8_ranks_and_32_microbatches_every_bar_carries_a_number_that_fits(name: str) -> None:
    timeline = predicted(name, 8, 32)
    inside = [label for label in labels_of(timeline) if label.text.isdigit() and label.size == 11]
    assert len(inside) == len(timeline.compute)
    widths = {(round(bar.x + bar.width / 2, 3), bar.y): bar.width for bar in bars_of(timeline)}
    for label in inside:
        assert text_width(label.text, label.size) <= widths[round(label.x, 3), label.y - 13]


def test_kinds_are_told_apart_by_lightness_alone() -> None:
    levels = sorted(lightness(fill(kind)) for kind in (Kind.F, Kind.I, Kind.B, Kind.W))
    assert all(b - a > 12 for a, b in pairwise(levels))
    assert lightness(IDLE) - levels[-1] > 5
    for kind in (Kind.F, Kind.I, Kind.B, Kind.W):
        assert lightness(fill(kind, 1.0)) > lightness(fill(kind)) + 4
        for chunk in (0.0, 1.0):
            background = fill(kind, chunk)
            assert abs(lightness(background) - lightness(ink(background))) > 40


def test_later_stages_of_a_rank_are_lighter() -> None:
    timeline = predicted("interleaved-1f1b", 4, 8)
    colours = {
        span.action.stage: bar.fill
        for bar, span in zip(bars_of(timeline), timeline.compute, strict=True)
        if span.action.kind is Kind.F
    }
    assert len(set(colours.values())) == 2
    assert lightness(colours[4]) > lightness(colours[0])
    assert colours[4] == colours[7]


def test_an_arrow_goes_from_each_send_to_its_receive() -> None:
    timeline = predicted("1f1b", 3, 4, transfer=0.5)
    heads = [s for s in lay_out(timeline).shapes if isinstance(s, Line) and s.arrow and s.hint]
    assert len(heads) == len(timeline.transfers) // 2
    assert sum("SEND_F" in head.hint for head in heads) == 8
    for head in heads:
        assert head.to_x > head.x
        assert (head.to_y > head.y) == ("SEND_F" in head.hint)


def test_a_fused_pair_is_one_bar_of_two_halves() -> None:
    pair = FusedPair(Action(Kind.F, 0, 1), Action(Kind.B, 0, 0))
    schedule = Schedule("pair", 2, (0,), ((Action(Kind.F, 0, 0), pair, Action(Kind.B, 0, 1)),))
    bars = bars_of(simulate(schedule, Costs.uniform(1)))
    upper, lower_half = (bar for bar in bars if "OVERLAP" in bar.hint)
    assert (upper.x, upper.width) == (lower_half.x, lower_half.width)
    assert upper.y + upper.height == lower_half.y
    assert [upper.fill, lower_half.fill] == [fill(Kind.F), fill(Kind.B)]


def test_what_is_too_big_for_bars_shows_shares() -> None:
    timeline = predicted("1f1b", 4, 2000)
    boxes = bars_of(timeline)
    assert len(boxes) < 4 * 240 * 3
    assert lay_out(timeline).width < 1600
    assert any(box.hint.startswith("rank 3, ") and "F 3" in box.hint for box in boxes)
    for rank, columns in enumerate(shares(timeline, 240)):
        step = timeline.makespan / 240
        assert max(sum(column.values()) for column in columns) <= 1 + 1e-9
        busy = sum(sum(column.values()) for column in columns) * step
        assert busy == pytest.approx(timeline.busy_us[rank])


def test_one_rank_and_an_empty_timeline_can_be_drawn() -> None:
    ET.fromstring(draw_svg(predicted("gpipe", 1, 1)))
    schedule = build_schedule("gpipe", ranks=2, microbatches=1)
    ET.fromstring(draw_svg(Timeline(schedule, ())))


def test_the_same_timeline_gives_the_same_bytes(tmp_path: Path) -> None:
    for path in (tmp_path / "a", tmp_path / "b"):
        timeline = predicted("interleaved-1f1b", 2, 4, transfer=0.25)
        write_svg(timeline, path.with_suffix(".svg"))
        write_png(timeline, path.with_suffix(".png"), title="the same")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert len(list(tmp_path.iterdir())) == 4


def test_the_png_has_two_dots_a_pixel_and_the_colours_of_the_layout(tmp_path: Path) -> None:
    from matplotlib.image import imread

    timeline = predicted("1f1b", 2, 2)
    write_png(timeline, tmp_path / "picture.png")
    pixels = imread(tmp_path / "picture.png")
    sheet, bar = lay_out(timeline), bars_of(timeline)[0]
    assert pixels.shape[1] == pytest.approx(2 * sheet.width, abs=2)
    colour = pixels[int(2 * (bar.y + 2)), int(2 * (bar.x + 3))][:3]
    assert "#" + "".join(f"{round(float(c) * 255):02x}" for c in colour) == fill(Kind.F)


def test_without_matplotlib_the_cure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'npu-pipe\[plot\]'"):
        write_png(predicted("1f1b", 2, 2), tmp_path / "picture.png")
    assert list(tmp_path.iterdir()) == []
