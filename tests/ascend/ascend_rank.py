"""One rank of an AscendCluster: as tests/gloo/cluster_rank.py, with an NPU of its own."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a job prints, or torch_npu when it is imported, goes to stderr
    warnings.resetwarnings()  # torch_npu warns of itself
    for name in ("HOME_PATH", "OPP_PATH", "CUSTOM_OPP_PATH", "RT_VISIBLE_DEVICES"):
        os.environ.pop(f"ASCEND_{name}", None)  # they would point at a real CANN

    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    from npu_pipe.launch.world import Launcher, World

    torch.set_num_threads(1)
    torch.npu.set_device(int(os.environ["RANK"]))
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
            module = importlib.import_module(f"ascend_jobs.{order['module']}")
            answer = {"value": getattr(module, order["function"])(world, **order["arguments"])}
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
