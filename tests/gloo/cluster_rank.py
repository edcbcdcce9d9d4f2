"""One rank of a Cluster: reads jobs from standard input, answers on standard output."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

import torch
import torch.distributed as dist

from npu_pipe.launch.world import Launcher, World


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a job prints goes to standard error
    torch.set_num_threads(1)
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
        try:
            job = getattr(importlib.import_module(f"jobs.{order['module']}"), order["function"])
            answer = {"value": job(world, **order["arguments"])}
        except Exception as error:
            answer = {
                "error": type(error).__name__,
                "text": str(error),
                "trace": traceback.format_exc(),
            }
        if dist.is_initialized():
            dist.destroy_process_group()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    answers.close()


main()
