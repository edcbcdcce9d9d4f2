"""The page holds what the timelines say, loads nothing, and stays small."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from npu_pipe import Costs, Schedule, Timeline, build_schedule, lower, simulate
from npu_pipe.ir.action import FusedPair, flatten
from npu_pipe.schedules.registry import FAMILIES
from npu_pipe.simulator.memory import Memory, memory_levels, peak_memory
from npu_pipe.timeline.html import Panel, html
from npu_pipe.timeline.last_needs import last_needs
from npu_pipe.timeline.levels import Levels, Unit, held_activations
from npu_pipe.timeline.picture import write_html


def predicted(name: str, ranks: int, microbatches: int, **costs: float) -> Timeline:
    schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
    times = Costs.uniform(schedule.stages, **costs)
    return simulate(lower(schedule, times), times)


def data_of(page: str) -> Any:
    packed = re.search(r'id="data" type="text/plain">([^<]*)<', page)
    assert packed
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))


def waited(timeline: Timeline, name: str) -> tuple[str, float, float, float]:
    """What a step needed last, when that was sent and there, and how long its rank was idle."""
    index = [str(span.action) for span in timeline.compute].index(name)
    need, span = last_needs(timeline)[index], timeline.compute[index]
    assert need is not None
    before = timeline.compute[index - 1]
    free = before.end_us if before.rank == span.rank else 0.0
    giver = str(timeline.compute[need.giver].action)
    return giver, need.sent_us, need.arrived_us, span.start_us - free


def test_the_page_loads_nothing_and_its_policy_forbids_it() -> None:
    page = html([Panel(predicted("1f1b", 2, 4))])
    assert page.startswith("<!DOCTYPE html>")
    assert "default-src 'none'" in page
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|\bfetch\(|XMLHttpRequest", page)
    assert page.count("<script") == 2


def test_the_same_timelines_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_html([Panel(predicted("zb-v", 2, 4, transfer=0.25))], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_text(encoding="utf-8").isascii()


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "interleaved-1f1b"])
def test_the_columns_unfold_to_the_spans(name: str) -> None:
    timeline = predicted(name, 4, 8, transfer=0.3)
    (panel,) = data_of(html([Panel(timeline)]))["panels"]
    rows, tick = panel["rows"], panel["tick"]
    clocks, held = [0] * 4, list(panel["before"])
    assert sum(panel["counts"]) == len(timeline.compute)
    held_then = held_activations(timeline)
    for row, (span, need) in enumerate(zip(timeline.compute, last_needs(timeline), strict=True)):
        start = clocks[span.rank] + rows["gap"][row]
        clocks[span.rank] = start + rows["length"][row]
        assert start * tick == pytest.approx(span.start_us, abs=1e-5)
        assert clocks[span.rank] * tick == pytest.approx(span.end_us, abs=1e-5)
        parts = flatten(span.action)
        sort = panel["sorts"][rows["sort"][row]]
        assert [part[:2] for part in sort] == [[part.kind, part.stage] for part in parts]
        assert rows["microbatch"][row] == parts[0].microbatch
        assert rows["second"][row] == parts[-1].microbatch
        assert rows["giver"][row] == (row - need.giver if need else 0)
        held[span.rank] += rows["rise"][row]
        assert held[span.rank] == held_then.during[row]
        held[span.rank] += rows["fall"][row]


def test_what_a_step_waited_for_by_hand() -> None:
    """
    rank 0  |0F0|0F1|                      |0B0  |     transfers take 0.5
    rank 1       .5 |1F0|1B0  |1F1|  .5 to 0B0
    """
    timeline = predicted("1f1b", 2, 2, transfer=0.5)
    assert last_needs(timeline)[0] is None, "0F0 needs only the batch"
    assert waited(timeline, "1F0") == ("0F0", 1.0, 1.5, 1.5)
    assert waited(timeline, "1B0") == ("1F0", 2.5, 2.5, 0.0)
    assert waited(timeline, "1F1") == ("0F1", 2.0, 2.5, 0.0)
    assert waited(timeline, "0B0") == ("1B0", 4.5, 5.0, 3.0)


def test_a_weight_half_needs_its_input_half_and_a_fused_pair_the_later_of_two() -> None:
    assert waited(predicted("zb-h1", 2, 4), "1W0")[0] == "1I0"
    timeline = predicted("dualpipe", 4, 8, transfer=0.1)
    for need, span in zip(last_needs(timeline), timeline.compute, strict=True):
        if isinstance(span.action, FusedPair):
            assert need is not None
            assert need.arrived_us <= span.start_us + 1e-9
            giver = flatten(timeline.compute[need.giver].action)
            assert {a.microbatch for a in giver} & {a.microbatch for a in flatten(span.action)}


def test_without_transfers_a_need_is_there_when_it_ends() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=2)
    assert waited(simulate(schedule, Costs.uniform(2)), "1F0") == ("0F0", 1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_levels_rise_to_the_peaks(name: str) -> None:
    schedule = build_schedule(name, ranks=4, microbatches=8)
    costs = Costs.uniform(schedule.stages, transfer=0.1)
    program = lower(schedule, costs)
    timeline = simulate(program, costs)
    assert peaks(timeline, held_activations(timeline)) == list(timeline.peak_activations)
    stages = schedule.stages
    memory = Memory((3.0,) * stages, (1.0,) * stages, (50.0,) * stages, (2.0,) * (stages - 1))
    for subject in (schedule, program):
        levels = memory_levels(subject, memory)
        assert levels.unit is Unit.BYTES
        assert len(levels.during) == len(levels.after) == len(timeline.compute)
        expected = [peak.total_bytes for peak in peak_memory(subject, memory)]
        assert peaks(timeline, levels) == expected


def peaks(timeline: Timeline, levels: Levels) -> list[float]:
    found = list(levels.before)
    for span, level in zip(timeline.compute, levels.during, strict=True):
        found[span.rank] = max(found[span.rank], level)
    return found


def test_all_activations_are_given_back_at_the_end() -> None:
    timeline = predicted("zb-v", 4, 8)
    levels = zip(timeline.compute, held_activations(timeline).after, strict=True)
    assert {span.rank: level for span, level in levels} == dict.fromkeys(range(4), 0)


def test_the_table_has_the_numbers_without_any_script() -> None:
    page = html([Panel(predicted("1f1b", 4, 8))])
    assert '<th scope="col">peak activations</th>' in page
    assert "<tr><td>0</td><td>0</td><td>24</td><td>27.3%</td><td>4</td><td>0F3</td></tr>" in page
    assert 'role="img" aria-label="Timeline of 1f1b: 4 ranks, 8 microbatches: makespan 33' in page


def test_bytes_are_written_in_units_that_people_read() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    memory = Memory((1.5 * 2**30,) * 2, (0.0,) * 2, (2.0**20,) * 2, (0.0,))
    timeline = simulate(schedule, Costs.uniform(2))
    page = html([Panel(timeline, memory_levels(schedule, memory))])
    assert "<td>3.001 GiB</td>" in page
    assert '<th scope="col">peak bytes</th>' in page


def test_panels_share_one_unit_of_time_and_are_compared_where_that_is_fair() -> None:
    slow = {"forward": 4000.0, "input_grad": 4000.0, "weight_grad": 4000.0}
    first = predicted("1f1b", 4, 8, **slow)
    better = predicted("zb-h1", 4, 8, **slow)
    page = html([Panel(first), Panel(better)])
    assert data_of(page)["symbol"] == "ms"
    assert "; against 1f1b: makespan -18.2%</p>" in page
    assert page.count('<section class="panel"') == 2
    half = predicted("zb-h1", 4, 8)
    assert "against" not in html([Panel(first), Panel(half)]), "another model"


def test_a_name_cannot_break_out_of_the_page() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=2)
    nasty = Schedule(
        '</title><script>x</script> $data "&\x1b', 2, schedule.placement, schedule.orders
    )
    page = html([Panel(simulate(nasty, Costs.uniform(2)))])
    assert "<script>x" not in page
    assert "&lt;/title&gt;&lt;script&gt;x&lt;/script&gt; $data &quot;&amp; :" in page


def test_small_and_empty_timelines_have_a_page() -> None:
    schedule = Schedule("empty", 1, (0,), ((),))
    page = html([Panel(Timeline(schedule, ())), Panel(predicted("gpipe", 1, 1))])
    assert data_of(page)["panels"][0]["rows"]["gap"] == []
    assert data_of(page)["panels"][1]["counts"] == [2]


def test_64_ranks_and_512_microbatches_fit_into_a_small_page() -> None:
    page = html([Panel(predicted("1f1b", 64, 512, transfer=0.2))])
    assert len(page) < 3_000_000
