"""Ranks of an AscendCluster: as tests/gloo/cluster_rank.py, with an NPU each; see nursery.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import warnings


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)  # whatever a job prints, or torch_npu when it is imported, goes to stderr
    warnings.resetwarnings()  # torch_npu warns of itself
    for name in ("HOME_PATH", "OPP_PATH", "CUSTOM_OPP_PATH", "RT_VISIBLE_DEVICES"):
        os.environ.pop(f"ASCEND_{name}", None)  # they would point at a real CANN

    import torch
    import torch_npu  # noqa: F401
    from rank_loop import answer_jobs

    import npu_pipe.pipeline  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here asks how they ended
    while True:
        order, files, _, _ = socket.recv_fds(line, 1 << 16, 2)
        if not order:
            return
        pid = os.fork()
        if pid:
            for file in files:
                os.close(file)
            line.send(str(pid).encode())
            continue
        line.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(json.loads(order))
        os.dup2(files[0], 0)
        os.close(files[0])
        torch.npu.set_device(int(os.environ["RANK"]))
        answer_jobs(os.fdopen(files[1], "w"), "ascend_jobs")
        return


main()
