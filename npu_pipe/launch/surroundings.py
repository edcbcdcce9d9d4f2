"""Surroundings: the environment that a rank was started in, as far as a pipeline cares."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from npu_pipe.device.versions import CANN_FOLDERS
from npu_pipe.finding import Verdict
from npu_pipe.launch.host import Host
from npu_pipe.launch.variables import is_set

__all__ = ["Surroundings", "cann_folders", "given_environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the rules about variables look at.

    backend: that the ranks' devices will use: hccl, nccl or gloo. local_ranks: of this host.
    is_bare: torch_npu is installed here without CANN. is_msrun: msrun started this process.
    is_alone: npu-pipe starts the ranks, all on this host, and has gloo stay on loopback.
    """

    environ: Mapping[str, str]
    host: Host
    backend: str
    local_ranks: int
    is_bare: bool = False
    is_msrun: bool = False
    is_alone: bool = False

    def value(self, name: str) -> str | None:
        """None if it is not set, or empty, which counts as the same."""
        return self.environ[name] if is_set(self.environ, name) else None

    def is_on(self, name: str) -> bool:
        """Whether a switch is set, and not to 0."""
        return self.value(name) not in (None, "0")

    def verdict(self, *backends: str) -> Verdict:
        """Of what nothing can run with, where one of these backends is used; else a warning."""
        return Verdict.REFUSE if self.backend in backends else Verdict.WARN


def given_environment() -> Mapping[str, str]:
    """The environment that this process was started with: our own command line changes it.

    As it is now, where the system does not tell.
    """
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: text for name, _, text in pairs}


def cann_folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where CANN lies: what its set_env.sh says, then where it is installed by default."""
    told = (environ.get(name) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"))
    return (*map(Path, filter(None, told)), *CANN_FOLDERS)
