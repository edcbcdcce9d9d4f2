"""Each family against its picture, its values and its closed forms, at F = I = W = 1."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest

from npu_pipe import Costs, Kind, Schedule, build_schedule, simulate
from npu_pipe.ir.action import Action, flatten
from npu_pipe.schedules.registry import FAMILIES
from npu_pipe.timeline.timeline import Span, Timeline

RANKS, MICROBATCHES = range(1, 9), (*range(1, 20), 24, 32, 40)


def build(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    return build_schedule(name, ranks=p, microbatches=m, chunks=v)


def run(name: str, p: int, m: int, v: int | None = None, *, weight_grad: float = 1) -> Timeline:
    schedule = build(name, p, m, v)
    return simulate(schedule, Costs.uniform(schedule.stages, weight_grad=weight_grad))


def peak(timeline: Timeline) -> int:
    return max(timeline.peak_activations)


# Pictures: capitals are a rank's first stage, small letters its second; & joins a fused pair,
# and what lasts several slots is drawn through them. They stand in the docstrings, where they
# were checked by hand against the rule.

PICTURES = [  # the family, the sizes of its pictures in turn, and the time of W
    ("gpipe", [(3, 4)], 0),
    ("1f1b", [(3, 4)], 0),
    ("looped-bfs", [(2, 2)], 0),
    ("zb-h1", [(3, 4)], 1),
    ("zb-h2", [(3, 5)], 1),
    ("interleaved-zb", [(2, 2)], 1),
    ("zb-v", [(2, 3), (3, 3)], 1),
    ("v-min", [(2, 3)], 1),
    ("v-half", [(2, 4)], 1),
    ("dualpipe", [(2, 4)], 1),
    ("dualpipe-v", [(2, 4)], 1),
    ("chimera", [(4, 4)], 0),
]


def picture(timeline: Timeline) -> list[str]:
    schedule = timeline.schedule
    rows = [""] * schedule.ranks
    for rank, track in enumerate(timeline.tracks()):
        second = set() if schedule.mirrored else set(schedule.stages_of(rank)[1:])
        now = 0
        for span in track:
            rows[rank] += ".. " * (int(span.start_us) - now) + cell(span, second)
            now = int(span.end_us)
        rows[rank] += ".. " * (int(timeline.makespan) - now)
    return [row.rstrip() for row in rows]


def cell(span: Span, second: set[int]) -> str:
    def label(action: Action) -> str:
        kind = str(action.kind)
        return f"{kind.lower() if action.stage in second else kind}{action.microbatch}"

    text = "&".join(map(label, flatten(span.action)))
    return text.ljust(3 * int(span.end_us - span.start_us) - 1, "-") + " "


@pytest.mark.parametrize(("name", "sizes", "weight_grad"), PICTURES)
def test_the_pictures_in_the_docstring_are_what_runs(name, sizes, weight_grad):
    doc = sys.modules[FAMILIES[name].build.__module__].__doc__
    shown = re.findall(r"rank \d   ((?: ?(?:[FBIWfbiw]\d[FBIWfbiw&\d-]*|\.\.))+)", doc)
    runs = [picture(run(name, p, m, weight_grad=weight_grad)) for p, m in sizes]
    assert shown == [row for rows in runs for row in rows]


def test_every_family_has_a_picture():
    # Interleaved 1F1B is drawn by its columns, which have a test of their own.
    assert {name for name, _, _ in PICTURES} == set(FAMILIES) - {"interleaved-1f1b"}


def test_the_list_in_the_docs_is_the_registry():
    docs = Path(__file__).parents[2] / "docs/schedules.md"
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", docs.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(FAMILIES)


VALUES = [  # name, (makespan, span, peak) at p = 4, m = 8 and at p = 8, m = 32
    ("gpipe", (33, 33, 8), (117, 117, 32)),
    ("1f1b", (33, 33, 4), (117, 117, 8)),
    ("interleaved-1f1b", (57, 57, 11), (213, 213, 23)),
    ("looped-bfs", (57, 57, 16), (213, 213, 64)),
    ("zb-h1", (27, 27, 4), (103, 103, 8)),
    ("zb-h2", (27, 24, 7), (103, 96, 15)),
    ("interleaved-zb", (51, 51, 8), (199, 199, 16)),
    ("zb-v", (51, 48, 8), (199, 192, 16)),
    ("v-half", (53, 53, 6), (209, 209, 10)),
    ("v-min", (59, 59, 4), (219, 219, 8)),
    ("dualpipe", (26, 26, 5), (102, 102, 9)),
    ("dualpipe-v", (54, 54, 9), (206, 206, 17)),
]


@pytest.mark.parametrize(("name", "small", "large"), VALUES)
def test_the_table_of_values(name, small, large):
    for (p, m), values in (((4, 8), small), ((8, 32), large)):
        timeline = run(name, p, m)
        assert (timeline.makespan, timeline.span, peak(timeline)) == values


@pytest.mark.parametrize("p", RANKS)
def test_closed_forms_of_zb_h1(p):
    for m in MICROBATCHES:
        timeline = run("zb-h1", p, m)
        # With fewer microbatches than ranks, not all of the cool-down can be filled with W.
        assert timeline.makespan == max(3 * m + p - 1, 2 * m + 2 * p - 1)
        assert timeline.peak_activations == (min(p, m),) * p


@pytest.mark.parametrize("p", RANKS)
def test_closed_forms_of_zb_h2(p):
    for m in MICROBATCHES:
        timeline, half = run("zb-h2", p, m), run("zb-h1", p, m)
        assert peak(timeline) == min(2 * p - 1, m)
        assert timeline.makespan == half.makespan
        if m >= 2 * p - 1:
            assert timeline.span == 3 * m


def test_zb_h2_is_worth_its_memory_where_transfers_are_slow():
    spans = {
        name: simulate(build(name, 4, 16), Costs.uniform(4, transfer=1)).makespan
        for name in ("zb-h1", "zb-h2")
    }
    assert spans["zb-h2"] < spans["zb-h1"]


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", RANKS)
def test_closed_forms_of_interleaved_zb(p, v):
    for m in range(p, 33, p):
        timeline = run("interleaved-zb", p, m, v)
        assert timeline.makespan == 3 * m * v + p - 1
        assert timeline.peak_activations == (v * p,) * p


@pytest.mark.parametrize("p", RANKS)
def test_interleaved_zb_with_one_chunk_is_zb_h1(p):
    for m in range(p, 33, p):
        assert build("interleaved-zb", p, m, 1).orders == build("zb-h1", p, m).orders


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", RANKS)
def test_closed_forms_of_looped_bfs(p, v):
    for m in MICROBATCHES:
        timeline = run("looped-bfs", p, m, v)
        assert timeline.makespan == 3 * (m * v + p - 1 + (v - 1) * max(0, p - m))
        assert timeline.peak_activations == (m * v,) * p


def fastest_on_a_v(p: int, m: int) -> int:
    """No schedule on the V placement is faster: of 6m, 5m, 4m and 2m actions, the earliest that
    the last or the first rank can begin them, and no idle time from then on."""
    return max(6 * m + p - 1, 5 * m + 2 * p - 1, 4 * m + 3 * p - 1, 2 * m + 4 * p - 1)


@pytest.mark.parametrize("p", [*RANKS, 12, 16])
def test_zb_v_is_optimal_for_every_number_of_microbatches(p):
    for m in MICROBATCHES if p <= 8 else (1, p, p + 1, 3 * p // 2, 2 * p - 2, 2 * p - 1):
        timeline = run("zb-v", p, m)
        assert timeline.makespan == fastest_on_a_v(p, m)
        assert peak(timeline) <= min(2 * p, 2 * m)
        if m >= 2 * p - 1:
            assert timeline.makespan == 6 * m + p - 1
            assert timeline.span == 6 * m


def test_zb_v_with_few_microbatches_beats_the_closed_form():
    assert run("zb-v", 8, 8).makespan == 55  # the closed form, cut off, takes 62


@pytest.mark.parametrize("p", [*RANKS, 9, 16])
def test_closed_forms_of_v_min(p):
    for m in MICROBATCHES[1:] if p <= 8 else (2, 17):
        timeline = run("v-min", p, m)
        bubble = 4 * p - 3 if p % 3 == 0 else 4 * p - 5
        assert timeline.makespan == 6 * m + (bubble if p > 1 else 0)
        assert peak(timeline) <= 2 * ((p + 4) // 3)
    assert peak(timeline) == 2 * ((p + 4) // 3)


@pytest.mark.parametrize("p", [*RANKS, 9, 16])
def test_closed_forms_of_v_half(p):
    bubble = {1: 0, 2: 1}.get(p, 3 * p - 4 if p % 2 else 3 * p - 7)
    for m in MICROBATCHES if p <= 8 else (p + 2, 2 * p + 1):
        timeline = run("v-half", p, m)
        assert peak(timeline) <= 2 * ((p + 2) // 2)
        if m >= p + 2:
            assert timeline.makespan == 6 * m + bubble
    assert peak(timeline) == 2 * ((p + 2) // 2)


def test_v_min_collapses_where_costs_differ():
    costs = partial(Costs.uniform, forward=10, input_grad=12, weight_grad=8)
    # Stages of v-min are half as large as those of 1f1b.
    assert simulate(build("v-min", 4, 32), costs(8)).makespan / 2 == 1208
    assert simulate(build("1f1b", 4, 32), costs(4)).makespan == 1050


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
def test_closed_forms_of_dualpipe(p):
    for m in range(2 * p, 2 * p + 20, 2):
        timeline = run("dualpipe", p, m)
        full_pair, whole, three_w = 1 + 2, 2, 3
        assert timeline.makespan == 3 * m + (p // 2 - 1) * (full_pair + whole - three_w)
        assert timeline.peak_activations == (p + 1,) * p
        assert timeline.schedule.mirrored == tuple(range(m // 2, m))


@pytest.mark.parametrize("p", [*RANKS, 16])
def test_closed_forms_of_dualpipe_v(p):
    for m in range(2 * p, 2 * p + 10):
        timeline = run("dualpipe-v", p, m)
        full_pair, whole, three_w = 1 + 2, 2, 3
        assert timeline.makespan == 6 * m + (p - 1) * (full_pair + whole - three_w)
        assert timeline.peak_activations == (2 * p + 1,) * p


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
def test_closed_forms_of_chimera(p):
    for m in range(p, 5 * p, p):
        timeline = run("chimera", p, m, weight_grad=0)
        assert timeline.makespan == 2 * m + p - 2
        assert peak(timeline) == p
        assert timeline.schedule.mirrored == tuple(range(m // 2, m))


def test_chimera_loses_to_1f1b_where_a_backward_takes_two_forwards():
    assert run("chimera", 4, 32).makespan == 114
    assert run("1f1b", 4, 32).makespan == 105


@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
def test_both_ranks_of_a_pair_do_the_same_for_the_two_replicas(name):
    schedule = build(name, 4, 8)

    def across(action: Action) -> Action:
        return Action(action.kind, action.stage, (action.microbatch + 4) % 8)

    for rank in range(4):
        steps = [a for step in schedule.orders[rank] for a in flatten(step)]
        other = [a for step in schedule.orders[3 - rank] for a in flatten(step)]
        assert list(map(across, steps)) == other


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min"])
def test_split_backwards_are_all_split(name):
    kinds = {a.kind for order in build(name, 4, 8).orders for a in order}
    assert kinds == {Kind.F, Kind.I, Kind.W}
