"""Schedules by torch's private names: an order of one's own from a CSV file, forwards only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster

from npu_pipe import build_schedule, load_schedule, lower, save_program, save_schedule

Get = Callable[[int], Cluster]
pytestmark = pytest.mark.timeout(120)

UNEVEN = """\
0F0,0F1,,2F0,2I0,2F1,2I1,2W0,0B0,2W1,0B1
,1F0,1F1,,1B0,,1B1,,,,
"""


def test_an_order_of_ones_own_is_run(cluster: Get, tmp_path: Path) -> None:
    """Three stages on two ranks; one of them splits its backward."""
    path = tmp_path / "order.csv"
    path.write_text(UNEVEN)
    rows = cluster(2).values(
        "torch_api_files.runs",
        path=str(path),
        placement=[0, 1, 0],
        microbatches=2,
        form="compute_only",
    )
    assert rows[0] == rows[1]
    (tmp_path / "again.csv").write_text("\n".join(rows[0]))
    assert load_schedule(tmp_path / "again.csv").orders == load_schedule(path).orders


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_what_a_named_schedule_wrote_is_run(cluster: Get, tmp_path: Path, form: str) -> None:
    schedule = build_schedule("interleaved-zb", ranks=2, microbatches=4)
    path = tmp_path / "order.csv"
    if form == "compute_only":
        save_schedule(schedule, path)
    else:
        save_program(lower(schedule), path)
    cluster(2).values(
        "torch_api_files.runs",
        path=str(path),
        placement=list(schedule.placement),
        microbatches=4,
        form=form,
    )


@pytest.mark.parametrize("form", [None, "compute_only", "compute_comms"])
@pytest.mark.parametrize("cls", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_each_rank_writes_a_file_of_its_own_that_torch_and_we_run(
    cluster: Get, tmp_path: Path, cls: str, form: str | None
) -> None:
    """Files of other names were taken for other schedules. Without a format, a named schedule
    writes its transfers too, as torch's does."""
    path = str(tmp_path / "order")
    rows = cluster(2).values("torch_api_files.written_and_read", path=path, cls=cls, form=form)
    assert rows[0] == rows[1]
    assert ("SEND_F" in rows[0][0]) == (form != "compute_only")


def test_an_unknown_form_is_refused(cluster: Get) -> None:
    """Anything else was taken for compute only."""
    for answer in cluster(2).run("torch_api_files.odd_form"):
        assert answer.error == "ConfigError"
        assert "'comms_only' was asked for" in answer.text


def test_a_file_of_other_numbers_is_refused(cluster: Get, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    save_schedule(build_schedule("1f1b", ranks=2, microbatches=4), path)
    for answer in cluster(2).run("torch_api_files.refused", path=str(path), microbatches=8):
        assert answer.error == "ScheduleError"
        assert "it has 2, 2 and 4, not 2, 2 and 8" in answer.text


def test_no_order_is_told(cluster: Get) -> None:
    for answer in cluster(2).run("torch_api_files.refused", path=None, microbatches=8):
        assert answer.error == "ConfigError"
        assert "none has been read; call _load_csv" in answer.text


def test_forwards_only(cluster: Get) -> None:
    cluster(2).values("torch_api_files.forward_only")
