"""One rank of an AscendCluster: as tests/gloo/cluster_rank.py, with an NPU of its own."""

from __future__ import annotations

import os
import warnings


def main() -> None:
    # As rank_loop does, which imports torch: torch_npu prints when it is imported.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.resetwarnings()  # torch_npu warns of itself
    for name in ("HOME_PATH", "OPP_PATH", "CUSTOM_OPP_PATH", "RT_VISIBLE_DEVICES"):
        os.environ.pop(f"ASCEND_{name}", None)  # they would point at a real CANN

    import torch
    import torch_npu  # noqa: F401
    from rank_loop import answer_jobs

    torch.npu.set_device(int(os.environ["RANK"]))
    answer_jobs(answers, "ascend_jobs")


main()
