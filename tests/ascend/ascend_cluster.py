"""Ranks with an NPU each: the real torch_npu on the emulator.

What has to be there is looked for once, and fetched or built where that may take its time.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cluster import TESTS as GLOO
from cluster import Answer, Cluster
from emulator.build import build
from nursery import start_rank

__all__ = ["MissingError", "ascend_cluster", "environment", "find_emulator"]

HERE = Path(__file__).parent
VERSION = "2.13.0"  # of torch and torch_npu: what the emulator was made for


class MissingError(Exception):
    """What the emulator needs and this machine does not have."""


def find_emulator(*, fetch: bool) -> tuple[Path, Path]:
    """(the emulator's libraries, the folder with torch_npu).

    fetch: get the wheel where it is not there yet, and build; then what goes wrong after the
    wheel is there is an error. Raises MissingError.
    """
    if torch.__version__.split("+")[0] != VERSION:
        raise MissingError(f"it is for torch {VERSION}, and this is {torch.__version__}")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise MissingError(f"it is for Linux on x86-64, and this is {platform.platform()}")
    site = _cache() / f"torch_npu-{VERSION}"
    if not site.exists():
        if not fetch:
            raise MissingError("its wheel is not there yet; `pytest -m ascend` gets it, and builds")
        _fetch(site)
    if not fetch:
        if not any(_cache().glob("emulator-*")):
            raise MissingError("it is not built yet; `pytest -m ascend` builds it")
        for tool in (os.environ.get("CXX", "g++"), "nm"):
            if shutil.which(tool) is None:
                raise MissingError(f"it is built with {tool}, which is not installed")
    return build(_cache(), site / "torch_npu"), site


def environment(libraries: Path, site: Path, knobs: Mapping[str, object]) -> dict[str, str]:
    """Of a process that imports torch_npu on the emulator. knobs: names without their prefix,
    see README.md."""
    paths = [site, HERE, GLOO, GLOO.parent / "pure"]
    found = {
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        # Below those that the kernel gives to connections: one that it gave away is in use.
        "HCCL_IF_BASE_PORT": "31000",
    }
    return found | {f"NPU_EMU_{name.upper()}": str(value) for name, value in knobs.items()}


class _Resting(Cluster):
    """Its ranks stand still between jobs: threads of torch_npu that have nothing to do poll."""

    def _run(
        self, job: str, ranks: Sequence[int], timeout_s: float, arguments: dict[str, Any]
    ) -> list[Answer]:
        self.signal(signal.SIGCONT)
        try:
            return super()._run(job, ranks, timeout_s, arguments)
        finally:
            self.signal(signal.SIGSTOP)


def ascend_cluster(ranks: int, libraries: Path, site: Path, knobs: Mapping[str, object]) -> Cluster:
    variables = environment(libraries, site, knobs)
    return _Resting(
        ranks, start=lambda rank: start_rank(libraries, {**variables, "RANK": str(rank)})
    )


def _fetch(site: Path) -> None:
    """Beside the environment, not into it: there it would be loaded by `import torch`."""
    _cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
        target = Path(scratch) / "site"
        options = ["--quiet", "--no-deps", "--retries", "1", "--timeout", "20"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]
        done = subprocess.run(
            [*command, f"torch-npu=={VERSION}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
            raise MissingError(f"its wheel torch-npu {VERSION} is not to be had: {last}")
        shutil.move(target, site)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu_pipe"
