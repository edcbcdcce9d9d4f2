"""Read torchrun's environment.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_pipe.launch.readers import torch_npu_run
from npu_pipe.launch.readers.elastic import MARK, read_agent
from npu_pipe.launch.variables import is_set
from npu_pipe.launch.world import Launcher, World

__all__ = ["claim", "read"]

_CURE = "start the ranks with torchrun, or unset all of them to run on this machine alone"


def claim(environ: Mapping[str, str]) -> str | None:
    """The variable that says that torchrun, and nothing built on it, has started this process."""
    return MARK if is_set(environ, MARK) and torch_npu_run.claim(environ) is None else None


def read(environ: Mapping[str, str]) -> World:
    """The World that torchrun describes. Raises ConfigError that names the variables."""
    agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return read_agent(environ, Launcher.TORCHRUN, agent_store=agent_store, cure=_CURE)
