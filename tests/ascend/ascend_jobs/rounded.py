"""A job that trains in bfloat16 on stages that ranks share: through the fused operators."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from npu_pipe import World
from npu_pipe.train.job import Job
from npu_pipe.train.metrics import read_metrics
from npu_pipe.train.toml import read_toml
from npu_pipe.train.trainer import train
from npu_pipe_kernels.npu import Npu


def trains(world: World, *, config: str, folder: str) -> dict[str, Any]:
    """What it says, the losses, and the dtypes that the fused operators were given and gave."""
    job = read_toml(Job, config)
    job = replace(job, run=replace(job.run, folder=Path(folder), device="npu"))
    seen: dict[str, set[str]] = {}

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(Npu, name)

        def call(self: Npu, x_mk: Tensor, right_kc: Tensor, ranks: Any) -> Any:
            made = real(self, x_mk, right_kc, ranks)
            out = made[0] if isinstance(made, tuple) else made
            seen.setdefault(name, set()).update(str(t.dtype) for t in (x_mk, right_kc, out))
            return made

        return call

    names = ("all_gather_matmul", "matmul_reduce_scatter")
    with (
        mock.patch.multiple(Npu, **{name: watched(name) for name in names}),
        redirect_stdout(io.StringIO()) as said,
    ):
        train(job, world)
    lines = read_metrics(Path(folder) / "metrics.jsonl") if world.rank == 0 else []
    return {
        "said": said.getvalue(),
        "losses": [line["loss"] for line in lines if line["kind"] == "update"],
        "seen": {name: sorted(dtypes) for name, dtypes in seen.items()},
    }
