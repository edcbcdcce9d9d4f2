"""Jobs that read the emulator's trace of the calls into HCCL."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from npu_pipe import MeanLoss, Microbatches, Pipeline, World, build_schedule
from npu_pipe.comm.device_pairs import pairs_used
from npu_pipe.comm.links import link_for
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.program import Lane, route

# More than there are microbatches, and prime: so that the size of a transfer says which it is.
WIDTHS = (17, 19, 23, 29, 31, 37, 41, 43, 47)


def step(world: World, *, name: str, microbatches: int) -> dict[str, Any]:
    """What this rank was to send and receive in a step, and what it did.

    wanted, done: per communicator or lane and peer, [SEND or RECV, number of elements], in order.
    """
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    place = torch.device("npu", world.rank)
    mine = {
        i: nn.Linear(WIDTHS[i], WIDTHS[i + 1]).to(place) for i in schedule.stages_of(world.rank)
    }
    first, last = WIDTHS[0], WIDTHS[schedule.stages]
    batch = Microbatches(
        [torch.ones(i + 1, first, device=place) for i in range(microbatches)],
        [torch.ones(i + 1, last, device=place) for i in range(microbatches)],
    )
    before = len(_trace())
    with Pipeline(
        mine,
        schedule=schedule,
        loss=MeanLoss(nn.functional.mse_loss),
        world=world,
        link=link_for(mine.values(), schedule=schedule),  # whose settings nobody looks at
    ) as pipe:
        pipe.step(batch)
        made = [each for each in _trace()[before:] if each["event"] == "init"]
        before = len(_trace())
        pipe.step(batch)
        calls = [each for each in _trace()[before:] if each["event"] == "enqueue"]
        program = pipe._lower(schedule)
    wanted: dict[str, list[list[Any]]] = {}
    for action in program.orders[world.rank]:
        if isinstance(action, Action) and not action.kind.is_compute:
            source, target, lane = route(schedule, action)
            peer = target if action.kind.is_send else source
            entry = ["Send" if action.kind.is_send else "Recv", _elements(action)]
            wanted.setdefault(f"{lane} {peer}", []).append(entry)
    done: dict[str, dict[str, Any]] = {}
    for call in calls:
        each = done.setdefault(call["comm"], {"peer": call["peer"], "streams": [], "calls": []})
        each["streams"].append(call["stream"])
        each["calls"].append([call["op"], call["bytes"] // 4])
    pairs = [pair for pair in pairs_used(schedule) if world.rank in (pair.low, pair.high)]
    return {
        "wanted": wanted,
        "done": done,
        "made": [[each["comm"], each["members"], each["buffer_mb"]] for each in made],
        "pairs": [[pair.lane is Lane.DOWN, [pair.low, pair.high]] for pair in pairs],
    }


def without_buffers(world: World) -> list[int]:
    """MB of the buffers of the communicators that are made where the variable is empty; torch_npu
    reads it once a process."""
    os.environ["P2P_HCCL_BUFFSIZE"] = ""
    return [buffer_mb for _, _, buffer_mb in step(world, name="1f1b", microbatches=4)["made"]]


def _elements(transfer: Action) -> int:
    down_model = transfer.kind in (Kind.SEND_F, Kind.RECV_B)
    boundary = transfer.stage + 1 if down_model else transfer.stage
    return (transfer.microbatch + 1) * WIDTHS[boundary]


def _trace() -> list[dict[str, Any]]:
    path = Path(os.environ["NPU_EMU_TRACE_DIR"]) / f"rank{os.environ['RANK']}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
