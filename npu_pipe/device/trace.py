"""Profiles that torch's own profiler takes, as a file for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from npu_pipe.ir.action import Action

__all__ = ["range_name", "torch_profile"]


@contextmanager
def torch_profile(
    activities: Sequence[torch.profiler.ProfilerActivity], path: Path
) -> Iterator[None]:
    """Of the block, written to `path` when it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(activities=activities) as profile:
        yield
    profile.export_chrome_trace(str(path))


def range_name(action: Action) -> str:
    """Not the bare text: torch takes 2F0 for a mangled name of C++, two letters long."""
    return f"action {action}"
