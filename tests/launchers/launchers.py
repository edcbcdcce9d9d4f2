"""The launchers that are there for real, and how each starts a command on the ranks of a node."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["MissingError", "StartCommand", "find_mindspore", "mpirun", "msrun", "torchrun"]

# (command, ranks, nodes, node, port) -> the command line of the launcher on that node
StartCommand = Callable[[Sequence[str], int, int, int, int], list[str]]

MINDSPORE = "2.10.0"
# What its msrun imports, beside numpy and others that this environment has.
_NEEDS = ("protobuf", "asttokens", "astunparse", "dill", "psutil", "scipy", "six")
_NEVER_LOADED = ("gpu*", "ascend", "libmindspore_gpu*", "libmindspore_*ascend*")
_GIB = 1 << 30
_DISK_BYTES = 6 * _GIB  # the wheel, unpacked, and once more while pip moves it
_INSTALL_S = 150


class MissingError(Exception):
    """What a launcher needs and this machine does not have."""


def torchrun(command: Sequence[str], ranks: int, nodes: int, node: int, port: int) -> list[str]:
    places = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *places),
        *(f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={ranks // nodes}"),
        *("--no-python", *command),
    ]


def mpirun(command: Sequence[str], ranks: int, nodes: int, node: int, port: int) -> list[str]:
    assert nodes == 1, "mpirun starts other nodes by itself"
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return ["mpirun", *options, "-n", str(ranks), *command]


def msrun(site: Path, *, join: bool = True) -> StartCommand:
    """site: where `find_mindspore` has found it."""

    def start(command: Sequence[str], ranks: int, nodes: int, node: int, port: int) -> list[str]:
        assert command[0] == sys.executable, "msrun starts the python that PATH has first"
        places = ["--master_addr=127.0.0.1", f"--master_port={port}", f"--log_dir=log{node}"]
        numbers = [f"--worker_num={ranks}", f"--local_worker_num={ranks // nodes}"]
        which = [f"--node_rank={node}"] if nodes > 1 else []
        program = [sys.executable, str(site / "bin" / "msrun"), f"--join={join}"]
        return [*program, *numbers, *places, *which, "python", *command[1:]]

    return start


def find_mindspore(*, fetch: bool) -> Path:
    """The folder with mindspore and its msrun, to be put on PYTHONPATH.

    fetch: get the wheel where it is not there yet. Raises MissingError.
    """
    if platform.system() != "Linux":
        raise MissingError(f"mindspore has msrun on Linux, and this is {platform.system()}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu_pipe"
    python = "".join(map(str, sys.version_info[:2]))
    site = cache / f"mindspore-{MINDSPORE}-cp{python}"
    if not site.exists():
        if not fetch:
            raise MissingError("its wheel is not there yet; `pytest -m msrun` gets it")
        cache.mkdir(parents=True, exist_ok=True)
        _fetch(site)
    return site


def _fetch(site: Path) -> None:
    """Beside the environment, not into it: 0.8 GB of the 2.6 GB are kept."""
    free = shutil.disk_usage(site.parent).free
    if free < _DISK_BYTES:
        raise MissingError(
            f"to install mindspore takes {_DISK_BYTES / _GIB:.0f} GiB for a while, and "
            f"{site.parent} has {free / _GIB:.1f}"
        )
    with tempfile.TemporaryDirectory(dir=site.parent) as scratch:
        target = Path(scratch) / "site"
        options = ["--quiet", "--no-deps", "--no-compile", "--no-cache-dir", "--only-binary=:all:"]
        limits = ["--retries", "1", "--timeout", "20"]
        command = [sys.executable, "-m", "pip", "install", *options, *limits, "--target", target]
        try:
            done = subprocess.run(
                [*command, f"mindspore=={MINDSPORE}", *_NEEDS],
                capture_output=True,
                text=True,
                check=False,
                timeout=_INSTALL_S,
                env={**os.environ, "TMPDIR": scratch},
            )
        except subprocess.TimeoutExpired as late:
            raise MissingError(f"mindspore was not installed within {_INSTALL_S} s") from late
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
            raise MissingError(f"mindspore {MINDSPORE} is not to be had: {last}")
        plugins = target / "mindspore" / "lib" / "plugin"
        for pattern in _NEVER_LOADED:  # on a host without an accelerator
            for path in plugins.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.move(target, site)  # complete, or not there
