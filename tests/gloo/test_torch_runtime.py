"""torch.distributed.pipelining reads our files and runs them; we read what it writes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.stage import _PipelineStageBase

from npu_pipe import (
    build_schedule,
    check,
    load_program,
    load_schedule,
    lower,
    save_program,
    save_schedule,
)
from npu_pipe.errors import ScheduleError

Get = Callable[[int], Cluster]

RUN = [
    ("zb-v", 2, 4),
    ("zb-v", 4, 8),
    ("interleaved-1f1b", 4, 8),
    ("zb-h1", 4, 6),
    ("v-min", 4, 8),
]
CLASSES = [
    (theirs.ScheduleInterleaved1F1B, 4, 8, 2),
    (theirs.ScheduleInterleaved1F1B, 4, 10, 3),
    (theirs.ScheduleInterleavedZeroBubble, 4, 8, 2),
    (theirs.ScheduleLoopedBFS, 3, 5, 2),
    (theirs.ScheduleZBVZeroBubble, 4, 8, 2),
    (theirs.ScheduleZBVZeroBubble, 4, 3, 2),
    (theirs.ScheduleDualPipeV, 4, 8, 2),
]


class Stage(_PipelineStageBase):
    """What a schedule class asks of a stage before it runs, without a process group."""

    _create_grad_recv_info = _prepare_forward_infra = _prepare_backward_infra = None  # not run

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = 0, ranks
        self.submod = None


def build_theirs(cls: Any, ranks: int, microbatches: int, chunks: int) -> Any:
    stages = ranks * chunks
    style = "v" if "V" in cls.__name__ else "loop"
    homes = generate_stage_to_rank_mapping(ranks, stages, style=style)
    mine = [Stage(stage, stages, ranks) for stage, rank in homes.items() if rank == 0]
    return cls(mine, microbatches)


def texts(orders: dict[int, list[Any]], *, but: tuple[Any, ...] = ()) -> list[list[str]]:
    """Their orders as we write them: without idle slots, and without actions of some kinds."""
    return [
        [str(a) for a in orders[rank] if a is not None and a.computation_type not in but]
        for rank in sorted(orders)
    ]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("transfers", [False, True], ids=["torch's transfers", "ours"])
@pytest.mark.parametrize(("name", "ranks", "microbatches"), RUN)
def test_our_schedule_in_their_runtime_gives_the_unsplit_gradients(
    cluster: Get, tmp_path: Path, name: str, ranks: int, microbatches: int, transfers: bool
) -> None:
    path = tmp_path / f"{name}.csv"
    schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
    if transfers:
        save_program(lower(schedule), path)
    else:
        save_schedule(schedule, path)
    losses = cluster(ranks).values(
        "torch_runtime.trains_as_unsplit", path=str(path), transfers=transfers, timeout_s=120
    )
    assert losses[schedule.placement[-1]] > 0
    assert sum(loss > 0 for loss in losses) == 1


@pytest.mark.parametrize(("cls", "ranks", "microbatches", "chunks"), CLASSES)
def test_their_schedules_are_read(
    tmp_path: Path, cls: Any, ranks: int, microbatches: int, chunks: int
) -> None:
    built = build_theirs(cls, ranks, microbatches, chunks)
    path = tmp_path / "theirs.csv"
    built._dump_csv(path, format="compute_only")
    schedule = load_schedule(path)
    assert [list(map(str, order)) for order in schedule.orders] == texts(built.pipeline_order)
    assert schedule.microbatches == microbatches
    assert dict(enumerate(schedule.placement)) == built.stage_index_to_group_rank


@pytest.mark.parametrize(("cls", "ranks", "microbatches", "chunks"), CLASSES)
def test_their_programs_are_read_and_proved(
    tmp_path: Path, cls: Any, ranks: int, microbatches: int, chunks: int
) -> None:
    """Their notes for FSDP go: UNSHARD and RESHARD are in all that they write."""
    built = build_theirs(cls, ranks, microbatches, chunks)
    path = tmp_path / "theirs.csv"
    built._dump_csv(path, format="compute_comms")
    assert "UNSHARD" in path.read_text()
    program = load_program(path)
    check(program)
    notes = (theirs.UNSHARD, theirs.RESHARD, theirs.REDUCE_GRAD)
    wanted = texts(built.pipeline_order_with_comms, but=notes)
    assert [list(map(str, order)) for order in program.orders] == wanted


@pytest.mark.parametrize(("cls", "ranks", "microbatches", "chunks"), CLASSES)
def test_ours_are_read_by_them_as_they_stand(
    tmp_path: Path, cls: Any, ranks: int, microbatches: int, chunks: int
) -> None:
    built = build_theirs(cls, ranks, microbatches, chunks)
    built._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    schedule = load_schedule(tmp_path / "theirs.csv")
    path = tmp_path / "ours.csv"
    save_schedule(schedule, path)
    built.pipeline_order = {}
    built._load_csv(path, format="compute_only")
    assert texts(built.pipeline_order) == [list(map(str, order)) for order in schedule.orders]
    program = lower(schedule)
    save_program(program, path)
    built._load_csv(path, format="compute_comms")
    read = texts(built.pipeline_order_with_comms, but=(theirs.REDUCE_GRAD,))
    assert read == [list(map(str, order)) for order in program.orders]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 8)])
def test_their_1f1b_table_is_refused_by_rank_and_action(
    tmp_path: Path, ranks: int, microbatches: int
) -> None:
    """Its last rank runs F1..Fm. Their GPipe table is in order."""
    for cls in (theirs.Schedule1F1B, theirs.ScheduleGPipe):
        table = cls(Stage(0, ranks, ranks), microbatches)._get_pipeline_order()
        with (tmp_path / f"{cls.__name__}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(table[rank] for rank in range(ranks))
    assert load_schedule(tmp_path / "ScheduleGPipe.csv").microbatches == microbatches
    with pytest.raises(ScheduleError, match=f"rank {ranks - 1} has") as error:
        load_schedule(tmp_path / "Schedule1F1B.csv")
    assert error.value.rank == ranks - 1
    assert error.value.action == f"{ranks - 1}F{microbatches}"
