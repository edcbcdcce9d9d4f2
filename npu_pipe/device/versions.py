"""Versions: of all that has to fit together, read without loading it.

Ascend's own are read where its installers leave them: CANN in `ascend_*_install.info` under its
folder, the driver in `driver/version.info` under the folder that `/etc/ascend_install.info` names.
That is where torch_npu's collect_env looks too.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path

__all__ = ["CANN_FOLDERS", "COMPARED", "PAIRED", "Versions", "minor_of", "versions_here"]

CANN_FOLDERS = (
    Path("/usr/local/Ascend/ascend-toolkit/latest"),
    Path("/usr/local/Ascend/cann"),
    Path("/usr/local/Ascend/latest"),
)
"""Where CANN lies if no variable says so."""

COMPARED = ("python", "npu_pipe", "torch", "torch_npu")
"""Of which ranks that differ do not start."""

PAIRED = ("cann", "npu_driver", "cuda", "cuda_driver")
"""Of which hosts should not differ."""

_LONGEST = 1 << 16  # characters of such a file


@dataclass(frozen=True, slots=True)
class Versions:
    """None for what is not there. cuda: that torch is built with."""

    python: str
    npu_pipe: str | None
    torch: str | None
    torch_npu: str | None
    cann: str | None
    npu_driver: str | None
    cuda: str | None
    cuda_driver: str | None
    mindspore: str | None

    def told(self) -> str:
        """For a person: those that are there."""
        there = (
            (field.name.replace("_", " "), getattr(self, field.name)) for field in fields(self)
        )
        named = {"npu pipe": "npu_pipe", "torch npu": "torch_npu", "cann": "CANN", "cuda": "CUDA"}
        return ", ".join(f"{named.get(name, name)} {found}" for name, found in there if found)


def versions_here(
    cann_folders: Iterable[Path] = CANN_FOLDERS, *, system: Path = Path("/")
) -> Versions:
    """Of this host. cann_folders: in this order. system: the folder that its files lie under."""
    torch, cuda = _torch()
    return Versions(
        python=platform.python_version(),
        npu_pipe=_installed("npu-pipe"),
        torch=torch,
        torch_npu=_installed("torch-npu"),
        cann=next(filter(None, map(_cann, cann_folders)), None),
        npu_driver=_npu_driver(system),
        cuda=cuda,
        cuda_driver=_found(
            system / "proc/driver/nvidia/version", r"Kernel Module(?: for \S+)? +([0-9][0-9.]*)"
        ),
        mindspore=_installed("mindspore"),
    )


def minor_of(text: str) -> str:
    """2.13.0+cpu -> 2.13: what two packages have to agree in."""
    return ".".join(text.split("+")[0].split(".")[:2])


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cann(folder: Path) -> str | None:
    for pattern in ("ascend_*_install.info", "*/ascend_*_install.info"):
        for path in sorted(folder.glob(pattern)):
            found = _found(path, r"(?m)^version=(\S+)")
            if found:
                return found
    return None


def _npu_driver(system: Path) -> str | None:
    told = _found(system / "etc/ascend_install.info", r"(?m)^Driver_Install_Path_Param=(\S+)")
    folders = (told or "/usr/local/Ascend", "/usr/local/Ascend")
    paths = (system / folder.lstrip("/") / "driver/version.info" for folder in folders)
    return next(filter(None, (_found(path, r"(?m)^Version=(\S+)") for path in paths)), None)


def _torch() -> tuple[str | None, str | None]:
    """Its version, and that of the CUDA it is built with, as torch itself has them: pip knows
    torch 2.13.0+cu130 of PyPI as 2.13.0."""
    try:
        there = Distribution.from_name("torch")
    except PackageNotFoundError:
        return None, None
    path = Path(str(there.locate_file("torch/version.py")))
    own, cuda = (
        _found(path, rf"(?m)^{name}\b[^=]*= *['\"](.+?)['\"]") for name in ("__version__", "cuda")
    )
    return own or there.version, cuda


def _found(path: Path, pattern: str) -> str | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")[:_LONGEST]
    except OSError:
        return None
    found = re.search(pattern, text)
    return found[1] if found else None
