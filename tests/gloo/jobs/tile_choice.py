"""Jobs that measure how many tiles a boundary is worth."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from jobs.injections import LINKS, strike
from jobs.tiles import WIDTH
from jobs.tiles_wrong import linears, pipe_of
from jobs.unsplit import LOSS
from npu_pipe import MeanLoss, NpuPipeError, Pipeline, World, build_schedule
from npu_pipe.comm.links import paced
from npu_pipe.comm.shared import Pace
from npu_pipe.comm.team import Team
from npu_pipe.comm.team_link import TeamLink
from npu_pipe.ir.action import Action
from npu_pipe.runtime.executor import Parcel
from npu_pipe_kernels.tile_choice import Measured
from npu_pipe_kernels.tiled import tiled


class Slow(TorchDispatchMode):
    """Products of 64 rows take this long, and fewer take their share."""

    def __init__(self, product_ms: float) -> None:
        super().__init__()
        self._row_s = product_ms / 64e3

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            time.sleep(self._row_s * args[-2].shape[0])
        return call(*args, **(kwargs or {}))


def measured(world: World, *, product_ms: float, wire_ms: float) -> dict[int, int]:
    """Tiles by boundary, of values of 64 rows."""
    pace = Pace(latency_us=100, bytes_per_us=64 * WIDTH * 8 / (wire_ms * 1e3))
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=2)
    mine = {world.rank: nn.Linear(WIDTH, WIDTH, dtype=torch.float64)}
    stages, link = tiled(mine, schedule=schedule, tiles=Measured(rows=64), link=paced(pace))
    with (
        Slow(product_ms),
        Pipeline(stages, schedule=schedule, loss=MeanLoss(LOSS), world=world, link=link) as pipe,
    ):
        return dict(pipe._link._tiles)


def struck_while_it_measures(
    world: World, *, fault: str, link: str, note: str, limit_s: float
) -> dict[str, Any]:
    """Rank 1 is at fault in its fifth send of the trial that the number of tiles is taken from."""

    def open_link(team: Team, *, poison: bool = False) -> TeamLink:
        opened = LINKS[link](team)
        send, sent = opened.send, []

        def hit(transfer: Action, parcel: Parcel) -> None:
            sent.append(transfer)
            if len(sent) == 5 and world.rank == 1:
                strike(fault, limit_s, Path(note))
            send(transfer, parcel)

        opened.send = hit  # type: ignore[method-assign]
        return opened

    tiles = Measured(rows=4)
    with redirect_stderr(io.StringIO()):
        try:
            with pipe_of(
                world, linears(world.size), tiles=tiles, link=open_link, timeout_s=limit_s
            ):
                raise AssertionError("nobody has failed")
        except (NpuPipeError, ValueError) as error:
            seconds = time.monotonic() - float(Path(note).read_text())
            return {"said": f"{type(error).__name__}: {error}", "seconds": seconds}
