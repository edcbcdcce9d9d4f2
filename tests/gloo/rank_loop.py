"""What a rank of a Cluster does: read jobs from standard input, answer on standard output."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from contextlib import suppress
from typing import Any, TextIO

import torch
import torch.distributed as dist

from npu_pipe.launch.world import Launcher, World

__all__ = ["answer_jobs"]


def answer_jobs(answers: TextIO, package: str) -> None:
    """Say that it is here, then answer until there are no more. package: of the jobs' modules."""
    torch.set_num_threads(1)
    answers.write("here\n")
    answers.flush()
    for line in sys.stdin:
        order = json.loads(line)
        place = order["world"]
        world = World(
            rank=place["rank"],
            size=place["size"],
            local_rank=place["rank"],
            address="127.0.0.1",
            port=place["port"],
            launcher=Launcher.TORCHRUN,
            restarts=place["job"],
            agent_store=True,
        )
        answers.write(json.dumps(_answer(world, f"{package}.{order['module']}", order)) + "\n")
        answers.flush()
    answers.close()


def _answer(world: World, module: str, order: dict[str, Any]) -> dict[str, Any]:
    try:
        job = getattr(importlib.import_module(module), order["function"])
        return {"value": job(world, **order["arguments"])}
    except Exception as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "trace": traceback.format_exc(),
        }
    finally:
        if dist.is_initialized():
            with suppress(RuntimeError):  # of a group that a job has broken
                dist.destroy_process_group()
