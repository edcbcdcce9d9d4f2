"""What a profile by torch_npu shows of a step: the ranges that msprof-analyze's pp_chart draws."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster

# The rows that pp_chart selects from a profile, and what it draws each as. It joins them with the
# tasks of the device, so a range without a stream is not among them; and it leaves out a range that
# begins before the one before it has ended.
SELECTED = ("forward", "backward", "WeightGradStore_pop")


def drawn(message: str) -> str | None:
    if not any(word.lower() in message.lower() for word in SELECTED):
        return None
    return "FP" if "forward" in message.lower() else "BP"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_each_action_is_a_range_on_the_stream_that_computes_as_pp_chart_reads_them(
    npus: Callable[..., Cluster], tmp_path: Path, name: str
) -> None:
    arguments = {"name": name, "microbatches": 8, "folder": str(tmp_path)}
    for rank, found in enumerate(npus(2).values("marks.step", **arguments)):
        assert found["outside"] == 0, "nothing is marked where nobody takes a profile"
        assert found["measured"] == found["wanted"]
        # Of each transfer too there is a range: torch_npu's own, on the stream of its communicator.
        selected = {m["id"]: m["stream"] for m in found["marks"] if drawn(m.get("message", ""))}
        assert len(set(selected.values())) == 1
        tasks = [mark for mark in found["marks"] if mark["id"] in selected]
        begins, ends = tasks[0::2], tasks[1::2]
        assert [(b["event"], b["id"]) for b in begins] == [("begin", e["id"]) for e in ends]
        assert {end["event"] for end in ends} == {"end"}, "one has ended before the next begins"
        assert {begin["domain"] for begin in begins} == {"default"}
        said = [ast.literal_eval(begin["message"]) for begin in begins]
        assert [each["action"] for each in said] == found["wanted"]
        for each, begin in zip(said, begins, strict=True):
            kind, microbatch = each["action"][1], int(each["action"][2:])
            assert each["current_microbatch"] == microbatch
            assert drawn(begin["message"]) == ("FP" if kind == "F" else "BP")
            assert ("WeightGradStore_pop" in begin["message"]) == (kind == "W")
        (profile,) = [path for path in tmp_path.iterdir() if path.name.startswith(f"rank-{rank}_")]
        assert (profile / "profiler_info.json").exists() or (profile / "FRAMEWORK").exists()
