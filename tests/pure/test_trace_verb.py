"""npu-pipe trace: one screen, JSON for programs, a picture; one message for what is missing."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from test_timeline_files import WINDOW
from test_usage import jittered

from npu_pipe import Costs, Timeline, build_schedule, lower, simulate
from npu_pipe.cli.main import main
from npu_pipe.planner.changes import unfused
from npu_pipe.runtime.record import Recorder
from npu_pipe.schedules.registry import FAMILIES
from npu_pipe.timeline.phase import Phase
from npu_pipe.timeline.timeline import Span
from npu_pipe.train.analysis import analyse
from npu_pipe.train.window import MeasuredWindow, write_window


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(window: MeasuredWindow) -> None:
    Path("run").mkdir()
    Path("run/config.toml").write_text("")
    write_window(window, Path("run/window.json"))


def large(ranks: int) -> MeasuredWindow:
    """A measured window in which stage 2 is slow."""
    schedule = build_schedule("1f1b", ranks=ranks, microbatches=16)
    even = [10] * (schedule.stages - 3)
    costs = Costs(
        [10, 10, 16, *even],
        [20, 20, 32, *(2 * time for time in even)],
        [0] * schedule.stages,
        [4] * (schedule.stages - 1),
    )
    timeline = jittered(simulate(lower(schedule), costs), 1)
    parts = ("compute", "transfers", "waits")
    moved: dict[str, tuple[Span, ...]] = {
        part: tuple(
            s._replace(start_us=10 * s.start_us + 50, end_us=10 * s.end_us + 50)
            for s in getattr(timeline, part)
        )
        for part in parts
    }
    layers = ((1.0, 1.0, 1.0, 1.0),) * schedule.stages
    return MeasuredWindow(3, 2, layers, Timeline(schedule, **moved), None)


def test_one_screen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(WINDOW)
    assert main(["trace", "run"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert len(out.splitlines()) < 45
    assert max(map(len, out.splitlines())) <= 100
    for words in (
        "run, update 7: 1f1b: 2 ranks, 1 microbatch\n",
        "the window took 6.2 ms, predicted 5.9 ms: +0.3 ms (+5.1%)",
        "on the critical path transfer +0.3 ms",
        "phases, on the slowest rank: loss 0.1 ms, optimizer 0.2 ms",
        "48.4 (50.8)",
        "rank 1: 3.19  0RECV_B0 3.19",
        "Critical path: compute 5.5 ms, transfer 0.7 ms\n",
        "1F0 on rank 1: +0.3 ms: transfer +0.3 ms",
        "28.8% less time a microbatch: 2 microbatches of the same size instead of 1\n",
        "12.7% less time a microbatch: schedule zb-h1\n",
    ):
        assert words in out, out
    assert re.search(r" 1\.5 +4 +1 +1F0 \.\. 1B0, 2 actions +2\.5 +1RECV_F0 +0\.5\n", out), out


def test_the_path_of_a_large_window_is_shortened(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(large(8))
    assert main(["trace", "run"]) == 0
    out, _ = capsys.readouterr()
    assert len(out.splitlines()) < 55
    assert " shorter ones " in out
    assert "MB" not in out, "memory was not measured"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_can_be_told_of(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """As it is run today: fused pairs one half after the other."""
    schedule = build_schedule(name, ranks=4, microbatches=8)
    stages = schedule.stages
    costs = Costs(
        [100 + s for s in range(stages)], [100] * stages, [90] * stages, [5] * (stages - 1)
    )
    timeline = jittered(simulate(lower(unfused(schedule)), costs), 3)
    ahead = min(span.start_us for span in (*timeline.compute, *timeline.transfers))
    parts = ("compute", "transfers", "waits")
    shifted = {
        part: tuple(
            s._replace(start_us=s.start_us - ahead, end_us=s.end_us - ahead)
            for s in getattr(timeline, part)
        )
        for part in parts
    }
    measured = Timeline(schedule, **shifted)
    make_run(MeasuredWindow(1, 2, ((1.0, 2.0),) * stages, measured, None))
    assert main(["trace", "run"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"{name}: 4 ranks" in out
    assert main(["trace", "run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    share = told["difference_us"]["makespan"] / told["makespan_us"]["measured"]
    assert abs(share) < 0.02
    path = told["critical_path"]["measured"]
    total = sum(piece["end_us"] - piece["start_us"] for piece in path)
    assert total == pytest.approx(told["makespan_us"]["measured"])


def test_the_slow_stage_is_told_to_give(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(large(4))
    assert main(["trace", "run", "--json"]) == 0
    changes = {each["kind"]: each for each in json.loads(capsys.readouterr().out)["changes"]}
    assert "layer of stage 2 to stage" in changes["move_layer"]["what"]
    assert changes["move_layer"]["gain"] > 0.05


def test_json_has_all_of_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(WINDOW)
    assert main(["trace", "run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["version"], told["step"]) == ("npu_pipe.trace", 1, 7)
    assert told["makespan_us"] == {"measured": 6200, "predicted": 5900}
    assert told["step_us"] == 6500
    path = told["critical_path"]["measured"]
    assert [piece["name"] for piece in path] == ["0F0", "1RECV_F0", "1F0", "1B0", "0RECV_B0", "0B0"]
    assert sum(piece["end_us"] - piece["start_us"] for piece in path) == 6200
    zero, one = told["ranks"]
    use = zero["measured"]
    assert use["busy_us"] + use["waiting_us"] + use["idle_us"] == 6200
    assert use["waited_for"][0]["rank"] == 1
    assert use["phases_us"] == {"optimizer": 200}
    assert one["held_bytes"] == {"measured": 11, "predicted": 13, "highest": 13}
    assert {each["action"] for each in told["actions"]} == {"0F0", "0B0", "1F0", "1B0"}
    assert all(change["gain"] > 0 for change in told["changes"])


def test_nothing_helps_where_nothing_can(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = build_schedule("gpipe", ranks=1, microbatches=2)
    timeline = simulate(schedule, Costs([100], [100], [100], []))
    make_run(MeasuredWindow(1, 2, ((1.0,),), timeline, None))
    assert main(["trace", "run"]) == 0
    assert "nothing of these helps" in capsys.readouterr().out


@pytest.mark.parametrize("window", [WINDOW, large(4)], ids=["small", "large"])
def test_the_picture_has_both_with_their_paths(here: Path, window: MeasuredWindow) -> None:
    make_run(window)
    assert main(["trace", "run", "--svg", "picture.svg"]) == 0
    root = ET.parse("picture.svg").getroot()
    texts = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text.split(":")[0] for text in texts if "makespan" in text] == ["predicted", "measured"]
    titles = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")]
    marked = sum(title.startswith("critical: ") for title in titles)
    analysis = analyse(window)
    assert marked == len(analysis.path) + len(analysis.predicted_path)


def test_a_window_that_took_no_time_is_told_too(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = {
        part: tuple(s._replace(start_us=0.0, end_us=0.0) for s in getattr(WINDOW.timeline, part))
        for part in ("compute", "transfers")
    }
    make_run(replace(WINDOW, timeline=Timeline(WINDOW.timeline.schedule, **still)))
    for flags in ([], ["--json"], ["--svg", "picture.svg"]):
        assert main(["trace", "run", *flags]) == 0
    assert "nothing of these helps" in capsys.readouterr().out


def test_what_is_missing_or_broken_gives_one_message_with_status_2(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(WINDOW)
    window = Path("run/window.json")
    broken = window.read_text().replace("0F0", "0F7", 1)
    cases = [
        (lambda: None, "missing", "missing is not there; give the run.folder"),
        (lambda: None, "run/window.json", "run/window.json is a file; give"),
        (lambda: window.write_text(broken), "run", "run/window.json: "),
        (lambda: window.write_text("{"), "run", "run/window.json: Expecting"),
        (window.unlink, "run", "run/window.json is not there; let the run reach its last update"),
        (Path("run/config.toml").unlink, "run", "run holds no run; give"),
    ]
    for damage, name, words in cases:
        damage()
        assert main(["trace", name]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert words in err
    assert main(["trace"]) == 2


def test_a_picture_that_cannot_be_written_is_told(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(replace(WINDOW, footprint=None))
    assert main(["trace", "run", "--svg", "no/picture.svg"]) == 2
    assert "no/picture.svg" in capsys.readouterr().err


def test_a_recorder_notes_phases_also_of_what_fails() -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="broke"), recorder.during(Phase.OPTIMIZER):
        raise ValueError("broke")
    double = recorder.timed(Phase.LOSS, lambda value, *, times: value * times)
    assert double(3, times=2) == 6
    assert [phase for phase, _, _ in recorder.phases] == [Phase.OPTIMIZER, Phase.LOSS]
    times = [time for _, *both in recorder.phases for time in both]
    assert times == sorted(times)
