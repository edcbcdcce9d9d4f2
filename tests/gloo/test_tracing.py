"""What a step records of itself, and what `npu-pipe trace` makes of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from test_train_command import command, here  # noqa: F401 - a fixture
from torch import nn

from npu_pipe.cli.main import main
from npu_pipe.ir.action import flatten
from npu_pipe.lowering.lower import lower
from npu_pipe.planner.changes import unfused
from npu_pipe.runtime.memory import AllocatedBytes
from npu_pipe.timeline.critical import critical_path, parts_of
from npu_pipe.timeline.files import timeline_from_json
from npu_pipe.timeline.phase import Phase
from npu_pipe.timeline.usage import usage

OUTPUT = 64 * 64 * 8  # bytes of the output of a stage
NAMES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "chimera", "dualpipe-v"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("over_gloo", [False, True], ids=["shared", "gloo"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_records_all_that_it_did(
    cluster: Callable[[int], Cluster], name: str, over_gloo: bool
) -> None:
    first, second = cluster(2).values(
        "tracing.recorded", name=name, microbatches=4, over_gloo=over_gloo
    )
    assert first == second
    timeline = timeline_from_json(first)
    schedule = timeline.schedule
    compute = {span.action: span for span in timeline.compute}
    wanted = [a for order in schedule.orders for step in order for a in flatten(step)]
    assert sorted(compute) == sorted(wanted)
    receives = {span.action: span for span in timeline.transfers if span.action.kind.is_receive}
    waits = {span.action: span for span in timeline.waits}
    assert waits.keys() <= receives.keys()
    for action, wait in waits.items():
        assert receives[action].end_us <= wait.end_us, "it was there when the wait ended"
    for phase, lasts in (
        (Phase.CLIPPING, 2),
        (Phase.OPTIMIZER, 2),
        (Phase.REDUCTION, 2 if schedule.mirrored else 0),
        (Phase.LOSS, schedule.microbatches),
    ):
        assert sum(span.phase is phase for span in timeline.phases) == lasts, phase
    ends = [s for s in timeline.compute if s.action.stage == schedule.stages - 1]
    for span in timeline.phases:
        if span.phase is Phase.LOSS:
            mine = [s for s in ends if s.rank == span.rank]
            around = [s for s in mine if s.start_us <= span.start_us and span.end_us <= s.end_us]
            assert [s.action.kind for s in around] == ["F"]
        else:
            last = max(s.end_us for s in timeline.compute if s.rank == span.rank)
            assert span.start_us >= last
    events = (*timeline.compute, *timeline.transfers, *timeline.waits)
    assert min(span.start_us for span in events) == 0
    for use in usage(timeline):
        assert use.busy_us + use.waiting_us + use.idle_us == pytest.approx(timeline.makespan)
        assert use.idle_us >= 0
    assert timeline.step_us > timeline.makespan
    path = critical_path(timeline, lower(unfused(schedule)))
    assert parts_of(path).total_us == pytest.approx(timeline.makespan)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_the_bytes_that_ranks_hold_are_near_the_prediction(
    cluster: Callable[[int], Cluster], name: str
) -> None:
    """Apart from an output that has just been made; and where backwards are split, while an I
    runs the prediction has what it keeps twice: in the activation too."""
    least = 1 if name in ("gpipe", "1f1b", "interleaved-1f1b") else 0.7
    found = []
    for microbatches in (6, 12):
        answers = cluster(2).values("tracing.footprint", name=name, microbatches=microbatches)
        found.append([answer["held"] for answer in answers])
        for answer in answers:
            assert answer["parameters"] < answer["held"] <= answer["highest"]
            held, predicted = (answer[k] - answer["parameters"] for k in ("held", "predicted"))
            assert least * predicted - 64 <= held <= predicted + OUTPUT + 64
            plain, watched = answer["gradients"]
            assert plain == watched, "to the last bit"
            assert "rank 0 did not in the last one" in answer["refused"]
    fewer, more = found
    is_same = more == pytest.approx(fewer, rel=1e-3)  # each microbatch's loss is kept, 8 bytes
    assert is_same is (name != "gpipe"), "law 5: it does not grow with m"


def test_what_is_made_is_counted_until_it_is_freed() -> None:
    kib = torch.ones(256)
    with AllocatedBytes() as counter:
        before = kib + 1
        assert counter.live == 0, "it does not count yet"
        counter.counts = True
        made = kib * 2
        views = [made[:5], kib.view(2, 128), before.t()]
        kib.add_(made)
        assert counter.live == 1024
        embedding = nn.Embedding(4, 8, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        del made
        held = counter.live
        assert held > 1024, "a view holds it, and there are gradients"
        del views, embedding
        assert counter.live == 0
        assert counter.highest > held


@pytest.mark.timeout(120)
def test_trace_tells_of_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["trace", "run"]) == 2
    assert "run is not there" in capsys.readouterr().err
    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    assert main(["trace", "run"]) == 0
    out = capsys.readouterr().out
    for words in ("run, update 3: 1f1b: 2 ranks, 4 microbatches", "Critical path: ", "optimizer "):
        assert words in out
    assert main(["trace", "run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    makespan = told["makespan_us"]["measured"]
    path = told["critical_path"]["measured"]
    total = sum(piece["end_us"] - piece["start_us"] for piece in path)
    assert total == pytest.approx(makespan)
    for rank in told["ranks"]:
        use = rank["measured"]
        assert use["busy_us"] + use["waiting_us"] + use["idle_us"] == pytest.approx(makespan)
        assert {"clipping", "optimizer"} <= use["phases_us"].keys()
        peak, held = rank["peak_activations"], rank["held_bytes"]
        assert peak["measured"] == peak["predicted"] == 2 - rank["rank"]
        assert held["measured"] == pytest.approx(held["predicted"], rel=0.15)
    assert "loss" in told["ranks"][1]["measured"]["phases_us"]
    assert Path("run/comparison.svg").read_text().startswith("<svg")
