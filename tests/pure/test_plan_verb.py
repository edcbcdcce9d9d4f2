"""`npu-pipe plan`: what it recommends, prints and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_helpers.command import runners

from npu_pipe import build_schedule, load_schedule, simulate
from npu_pipe.cli.main import main
from npu_pipe.errors import ConfigError
from npu_pipe.planner.comparison import Comparison, compare
from npu_pipe.planner.limits import Limits
from npu_pipe.planner.workload import Workload
from npu_pipe.planner.workload_file import write_workload
from npu_pipe.schedules.registry import FAMILIES

HEAVY = Workload(  # 8 equal layers; bytes: 16e9 of parameters and 8e9 a microbatch
    forward=[1] * 8,
    input_grad=[1] * 8,
    weight_grad=[1] * 8,
    transfer=[0.2] * 7,
    activation_bytes=[1e9] * 8,
    parameter_bytes=[2e9] * 8,
)


def planned(
    workload: Workload, p: int, m: int, limits: Limits | None = None, **more: Any
) -> Comparison:
    return compare(workload, limits or Limits(), ranks=p, microbatches=m, **more)


def chosen(comparison: Comparison) -> str:
    assert comparison.advice.chosen is not None
    return comparison.advice.chosen.name


printed, refused = runners("plan")


# What it recommends


def test_the_reason_is_made_of_the_numbers() -> None:
    comparison = planned(Workload.even(4, transfer=0.25), 4, 8)
    rows = {row.name: row for row in comparison.rows}
    best = comparison.advice.chosen
    assert best is not None
    saved = 1 - best.makespan / rows["1f1b"].makespan
    times = best.crossings / rows["1f1b"].crossings
    reason = comparison.advice.reason
    assert f"Take {best.name}: makespan" in reason
    assert f"{saved:.1%} less than 1f1b's" in reason
    assert ("as many transfers" if times == 1 else f"{times:.3g} times the transfers") in reason
    assert ("backwards split into I and W" in reason) == best.is_split


def test_free_transfers_are_named_with_the_time_up_to_which_chunks_pay() -> None:
    comparison = planned(Workload.even(4), 4, 8)
    assert chosen(comparison) == "interleaved-zb v=4"
    (note,) = [note for note in comparison.advice.notes if "as free" in note]
    limit = float(note.rpartition("(")[2].rstrip(")."))
    for transfer, is_ahead in ((limit * 0.95, True), (limit * 1.05, False)):
        rows = {r.name: r for r in planned(Workload.even(4, transfer=transfer), 4, 8).rows}
        assert (rows["interleaved-zb v=4"].makespan < rows["zb-h1"].makespan) == is_ahead


def test_with_slow_transfers_chunks_are_not_worth_it() -> None:
    comparison = planned(Workload.even(4, transfer=0.5), 4, 8)
    assert comparison.advice.chosen is not None
    assert comparison.advice.chosen.chunks == 1


def test_within_one_percent_the_simpler_one_is_taken() -> None:
    comparison = planned(Workload.even(2), 2, 128)
    fastest = comparison.rows[0]
    assert fastest.makespan < next(r.makespan for r in comparison.rows if r.name == "1f1b")
    assert chosen(comparison) == "1f1b"
    assert f"{fastest.name} takes" in comparison.advice.reason
    assert "but holds the parameters twice" in comparison.advice.reason


def test_a_near_tie_is_not_bought_with_much_more_memory() -> None:
    comparison = planned(Workload.even(8), 8, 128)
    best = comparison.advice.chosen
    assert best is not None
    near = [row for row in comparison.rows if row.makespan <= comparison.rows[0].makespan * 1.01]
    assert any(row.held > 100 for row in near), "looped-bfs is among them"
    assert best.held <= 2 * min(row.held for row in near)


def test_zb_h2_gets_its_honest_word() -> None:
    notes = planned(Workload.even(4), 4, 8).advice.notes
    (note,) = [note for note in notes if note.startswith("zb-h2")]
    assert "shorter span, 24 against 27, but only the makespan of zb-h1" in note
    assert "1.75 times its activations" in note


def test_two_copies_are_never_advised_without_the_best_of_one() -> None:
    workload = Workload([1, 1, 1, 3], [1, 1, 1, 3], [1, 1, 1, 3], [0, 0, 0])
    comparison = planned(workload, 4, 8)
    assert comparison.advice.chosen is not None
    assert comparison.advice.chosen.copies == 2
    best = next(row for row in comparison.rows if row.copies == 1)
    assert f"With the parameters once, {best.name} takes" in comparison.advice.notes[0]


def test_caps_on_activations_mark_and_exclude() -> None:
    comparison = planned(Workload.even(4), 4, 8, Limits(activations=3))
    limits = comparison.limits
    for row in comparison.rows:
        assert (limits.broken_by(row) is None) == (row.held <= 3)
    assert chosen(comparison) == "v-half"
    assert "Without the limits interleaved-zb v=4 would take" in comparison.advice.notes[0]


def test_a_cap_that_none_keeps_says_how_near_the_leanest_comes() -> None:
    comparison = planned(Workload.even(4), 4, 8, Limits(activations=1))
    assert comparison.advice.chosen is None
    assert "the leanest, v-min, holds 2 activations of 1" in comparison.advice.reason


def test_caps_on_bytes() -> None:
    comparison = planned(HEAVY, 4, 8, Limits(memory_bytes=11e9))
    best = comparison.advice.chosen
    assert best is not None
    assert best.held_bytes is not None
    assert best.held_bytes <= 11e9
    over = [row for row in comparison.rows if comparison.limits.broken_by(row)]
    assert over
    assert all((row.held_bytes or 0) > 11e9 for row in over)
    none = planned(HEAVY, 4, 8, Limits(memory_bytes=3e9))
    assert "4 GB of it parameters" in none.advice.reason
    with pytest.raises(ConfigError, match="no activation_bytes"):
        planned(Workload.even(4), 4, 8, Limits(memory_bytes=1e9))


# Whether to have a pipeline at all


def test_few_microbatches_are_told_how_many_would_do() -> None:
    comparison = planned(Workload.even(8, transfer=0.5), 8, 8)
    best, worth = comparison.advice.chosen, comparison.worth
    assert best is not None
    assert best.bubble_ratio > 0.2
    assert worth.microbatches is not None
    assert any(f"use m >= {worth.microbatches}" in text for text in worth.sentences)
    schedule = build_schedule(
        best.schedule.name, ranks=8, microbatches=worth.microbatches, chunks=best.chunks
    )
    costs = Workload.even(8, transfer=0.5).stage_costs(schedule.stages)
    assert simulate(schedule, costs).bubble_ratio <= 0.1


def test_an_uneven_model_is_told_that_no_number_helps() -> None:
    workload = Workload([1, 1, 1, 3], [1, 1, 1, 3], [1, 1, 1, 3], [0, 0, 0])
    worth = planned(workload, 4, 6).worth  # too few for dualpipe, which would even it out
    assert worth.microbatches is None
    assert any("the busiest rank has 100% more work" in text for text in worth.sentences)


def test_a_model_that_fits_one_device_may_not_need_a_pipeline() -> None:
    roomy = planned(HEAVY, 4, 8, Limits(memory_bytes=80e9)).worth
    assert roomy.one_device_bytes == 24e9
    assert roomy.fits_one_device is True
    assert any("fits one device (24 GB), so pipeline" in text for text in roomy.sentences)
    tight = planned(HEAVY, 4, 8, Limits(memory_bytes=12e9)).worth
    assert tight.fits_one_device is False
    assert any("has to be split" in text for text in tight.sentences)
    unknown = planned(Workload.even(4), 4, 8).worth
    assert unknown.fits_one_device is None
    assert unknown.copies_time == pytest.approx(24)
    assert unknown.speedup == pytest.approx(96 / 24.75)


def test_a_pipeline_that_is_slower_than_one_device_is_called_so() -> None:
    comparison = planned(Workload.even(2, transfer=9), 2, 1)
    assert comparison.worth.speedup < 1
    assert "is not worth it: 2 ranks are no faster" in comparison.worth.sentences[0]
    assert "One rank is no pipeline" in planned(Workload.even(1), 1, 4).worth.sentences[0]


# The search


def test_the_searched_schedule_is_one_of_the_rows_and_keeps_its_caps() -> None:
    workload = Workload([1, 2, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1], [0.5, 0.1, 0.1])
    comparison = planned(workload, 4, 6, Limits(activations=3), search_s=0.5)
    searched = comparison.searched
    assert searched is not None
    assert searched.row in comparison.rows
    assert searched.row.makespan == searched.found.makespan
    assert searched.caps == (3, 3, 3, 3)
    assert max(searched.row.peak_activations) <= 3
    assert searched.found.lower_bound <= searched.row.makespan


def test_without_limits_it_may_hold_what_1f1b_does_and_with_bytes_what_they_allow() -> None:
    assert Limits().caps(HEAVY, ranks=4, microbatches=8) == (4,) * 4
    assert Limits(activations=2).caps(HEAVY, ranks=4, microbatches=8) == (2,) * 4
    # 4e9 of parameters and 2e9 of what an I half adds leave room for three of 2e9
    assert Limits(memory_bytes=12e9).caps(HEAVY, ranks=4, microbatches=8) == (3,) * 4
    comparison = planned(HEAVY, 4, 8, Limits(memory_bytes=7e9), search_s=0.1)
    assert comparison.searched is None
    assert "cannot hold one activation" in (comparison.unsearched or "")


# The command


def test_the_table_fits_a_pipe_and_names_every_schedule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = printed(capsys, "-p", "4", "-m", "8", "--search-s", "0")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in out
    rows = {" ".join(line.split()[:2]).lstrip("> "): line.split() for line in lines}
    for family in FAMILIES:
        assert any(name.startswith(family) for name in rows), family
    cells = next(line for line in lines if line.split()[:1] == ["zb-h2"]).split()
    assert cells[1:7] == ["27", "24", "11.1%", "7", "16", "1"]
    assert sum(line.startswith("> ") for line in lines) == 1


def test_what_does_not_fit_gets_a_line_with_its_nearest_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = printed(capsys, "-p", "3", "-m", "7", "--search-s", "0")
    assert "\nchimera: 3 ranks were given; use 2 or 4 ranks" in out
    assert "interleaved-1f1b, interleaved-zb: 7 microbatches" in out
    assert " ".join(out.split()).count("divide into 2 groups; use 6 or 8 microbatches") == 1
    assert all(line == line.rstrip() for line in out.splitlines())


KEYS = {
    *("format", "version", "ranks", "microbatches", "seed", "samples", "disturbances", "limits"),
    *("schedules", "refused", "search", "not_searched", "recommended", "reason", "notes", "worth"),
}
ROW_KEYS = {
    *("name", "schedule", "chunks", "stages", "makespan", "span", "bubble_ratio", "busy"),
    *("peak_activations", "peak_shares", "peak_bytes", "transfers", "parameter_copies"),
    *("split_backward", "fused_pairs", "loss", "within_limits", "over_limits"),
}


def test_json_has_all_numbers_under_stable_keys(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_workload(HEAVY, tmp_path / "costs.toml")
    words = ["-p", "4", "-m", "8", "--costs", str(tmp_path / "costs.toml"), "--memory-gb", "12"]
    data = json.loads(printed(capsys, *words, "--search-s", "0.2", "--json"))
    assert data.keys() == KEYS
    assert (data["format"], data["version"]) == ("npu_pipe.plan", 1)
    assert data["limits"] == {"activations": None, "memory_bytes": 12e9}
    for row in data["schedules"]:
        assert row.keys() == ROW_KEYS
        assert row["loss"].keys() == {"jitter", "slow_link", "slow_rank"}
        assert len(row["peak_bytes"]) == 4
    one = next(row for row in data["schedules"] if row["name"] == "1f1b")
    assert one["peak_bytes"][0] == {"total": 12e9, "parameters": 4e9, "action": "0F3"}
    assert one["transfers"][0] == {"ranks": [0, 1], "count": 16}
    assert data["search"].keys() == {
        *("makespan", "span", "lower_bound", "gap", "proved", "seconds", "max_activations"),
        "permutation",
    }
    assert data["recommended"] in {row["name"] for row in data["schedules"]}
    assert data["worth"]["fits_one_device"] is False


def test_what_is_proved_of_unlike_microbatches_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    even = Workload([1, 0.25], [2, 0.5], [1, 0.25], [1])
    for workload, says in (
        (even, "proved best, "),
        (
            replace(even, microbatch_scale=[4, 1, 1, 2]),
            "proved best with one order of the microbatches, ",
        ),
    ):
        write_workload(workload, tmp_path / "costs.toml")
        words = ("-p", "2", "-m", "4", "--costs", str(tmp_path / "costs.toml"))
        assert says in " ".join(printed(capsys, *words).split())


def test_one_seed_prints_one_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-p", "4", "-m", "6", "--transfer", "0.2", "--search-s", "0", "--json")
    assert printed(capsys, *words) == printed(capsys, *words)
    assert printed(capsys, *words) != printed(capsys, *words, "--seed", "1")


def test_save_writes_the_schedule_to_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "best.json"
    words = ("-p", "4", "-m", "8", "--transfer", "0.5", "--search-s", "0", "--save", str(path))
    best = json.loads(printed(capsys, *words, "--json"))["recommended"]
    assert load_schedule(path) == build_schedule(best, ranks=4, microbatches=8)
    assert main(["plan", *words, "--max-activations", "1"]) == 2
    assert "there is none; raise the limit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-p", "0", "-m", "8"), "ranks is a whole number of at least 1"),
        (("-p", "4", "-m", "0"), "microbatches is a whole number of at least 1"),
        (("-p", "4", "-m", "1000000000"), "it is 4 x 1 x 1000000000; give fewer of them"),
        (("-p", "4", "-m", "8", "--forward", "-1"), "forward is at least 0; it is -1"),
        (("-p", "4", "-m", "8", "--forward", "1e308"), "forward[0] is"),
        (
            ("-p", "4", "-m", "8", "--forward=0", "--input-grad=0", "--weight-grad=0"),
            "take no time; give times above 0",
        ),
        (("-p", "4", "-m", "8", "--transfer", "nan"), "transfer is at least 0; it is nan"),
        (("-p", "4", "-m", "8", "--memory-gb", "8"), "give them in a file (--costs)"),
        (("-p", "4", "-m", "8", "--max-activations", "0"), "max_activations is at least 1"),
        (("-p", "4", "-m", "8", "--costs", "nowhere.toml"), "nowhere.toml: No such file"),
        (("-p", "4", "-m", "8", "--costs", "x", "--transfer", "1"), "--costs and --transfer"),
        (("-p", "4", "-m", "8", "--profile", "."), "costs.toml is not there"),
        (("-p", "4"), "--microbatches"),
        (("-p", "four", "-m", "8"), "four"),
    ],
)
def test_mistakes_get_one_message_with_the_cure(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, *words)


def test_it_loads_neither_torch_nor_a_solver() -> None:
    code = (
        "import sys\nfrom npu_pipe.cli.main import main\n"
        "assert main(['plan', '-p', '2', '-m', '4', '--search-s', '0']) == 0\n"
        "assert not {'torch', 'safetensors', 'matplotlib', 'ortools'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
