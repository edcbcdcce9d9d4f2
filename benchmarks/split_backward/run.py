"""What cutting a backward in two costs: I + W over B on a transformer block, beside torch's own.

    python benchmarks/split_backward/run.py [--quick] [--json OUT]

One process, one thread. Ours and the functions of torch.distributed.pipelining run the same block
in turn; a case is (median of I + median of W) / (median of B), each side by its own B.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

from npu_pipe.runtime.boundary import flatten_value
from npu_pipe.runtime.stage import Stage
from npu_pipe.train.model import build_stage
from npu_pipe.train.model_config import ModelConfig

DIM, TOKENS, ROWS = 512, 256, 1
LLAMA = ModelConfig(dim=DIM, heads=8, hidden=1376, blocks=1, vocabulary=64)
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "llama block": lambda: build_stage(LLAMA, [1], seed=0),
    "gpt block": lambda: nn.TransformerEncoderLayer(
        DIM, 8, 4 * DIM, dropout=0, activation="gelu", batch_first=True, norm_first=True
    ),
}

Times = dict[str, float]
Side = Callable[[nn.Module, Tensor, Tensor], Times]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="a coarse answer in under a minute")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    cases = [measure(name, rounds=15 if flags.quick else 60) for name in BLOCKS]
    report(cases, flags.json)
    return 0


def measure(name: str, *, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    x, seed = (torch.randn(ROWS, TOKENS, DIM) for _ in range(2))
    sides: dict[str, tuple[Side, nn.Module]] = {
        "ours": (ours, BLOCKS[name]()),
        "peer": (torchs, BLOCKS[name]()),
    }
    times: dict[str, list[Times]] = {side: [] for side in sides}
    for turn in range(rounds + 2):
        for side, (run, module) in sides.items():
            found = run(module, x, seed)
            if turn >= 2:  # the first ones make `.grad` and fill caches
                times[side].append(found)
    parts = {s: {k: median(t[k] for t in found) for k in "BIW"} for s, found in times.items()}
    ours_, peer = (
        {k: part[k] / part["B"] for k in "IW"} | {"B_ms": part["B"] * 1e3}
        for part in parts.values()
    )
    one, other = ours_["I"] + ours_["W"], peer["I"] + peer["W"]
    shares = {"ours_parts": ours_, "peer_parts": peer}
    return {"case": name, "ours": one, "peer": other, "unit": "B", "ratio": one / other} | shares


def ours(module: nn.Module, x: Tensor, seed: Tensor) -> Times:
    stage = Stage(0, module)
    meta, _ = flatten_value(x.clone().requires_grad_(), "the input")
    for microbatch in range(2):
        stage.keep(microbatch, [stage.forward(microbatch, meta, [x])])
    start = time.perf_counter()
    stage.backward(0, [seed])
    middle = time.perf_counter()
    stage.input_backward(1, [seed])
    later = time.perf_counter()
    stage.weight_backward(1)
    return {"B": middle - start, "I": later - middle, "W": time.perf_counter() - later}


def torchs(module: nn.Module, x: Tensor, seed: Tensor) -> Times:
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    whole, halves = (module(each) for each in inputs)
    start = time.perf_counter()
    stage_backward(whole, seed, [inputs[0]])
    middle = time.perf_counter()
    _, groups = stage_backward_input([halves], [seed], [inputs[1]], module.parameters())
    later = time.perf_counter()
    stage_backward_weight(module.parameters(), groups)
    return {"B": middle - start, "I": later - middle, "W": time.perf_counter() - later}


def report(cases: list[dict[str, object]], path: Path | None) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, torch {torch.__version__}, {ROWS} x {TOKENS} tokens of {DIM}, one thread")
    for case in cases:
        print("{case:12} ours {ours:.3f} B  torch {peer:.3f} B  ratio {ratio:.2f}".format(**case))
        for side in ("ours_parts", "peer_parts"):
            print(
                "    {0}: I {I:.3f}, W {W:.3f} of a B of {B_ms:.2f} ms".format(side, **case[side])
            )
    if path is not None:
        result = {"name": "split_backward", "machine": machine, "cases": cases}
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
