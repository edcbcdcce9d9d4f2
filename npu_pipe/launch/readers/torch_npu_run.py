"""Read the environment of torch_npu_run, torchrun with a store of torch_npu's own.

Its agent serves a ParallelStore, made for tens of thousands of ranks, at MASTER_ADDR:MASTER_PORT.
torch's TCPStore cannot talk to it, although torchrun's variable says that the port is free:
TORCHELASTIC_USE_AGENT_STORE is False, TORCH_NPU_ELASTIC_USE_AGENT_STORE is True.

Source: torch_npu/distributed/run.py and rendezvous.py of torch_npu 2.13.0
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_pipe.errors import ConfigError
from npu_pipe.launch.readers.elastic import MARK, read_agent
from npu_pipe.launch.variables import is_set
from npu_pipe.launch.world import Launcher, World

__all__ = ["claim", "read"]

_PARALLEL = "TORCH_NPU_USE_PARALLEL_TCPSTORE"
_AGENT = "TORCH_NPU_ELASTIC_USE_AGENT_STORE"

_CURE = "start the ranks with torch_npu_run, or unset every TORCH_NPU_ variable of its store"


def claim(environ: Mapping[str, str]) -> str | None:
    """The variable that says that torch_npu_run has started this process."""
    return _PARALLEL if environ.get(_PARALLEL) == "True" else None


def read(environ: Mapping[str, str]) -> World:
    """The World that torch_npu_run describes. Raises ConfigError that names the variables."""
    if not is_set(environ, MARK):
        raise ConfigError(
            f"torch_npu_run sets {_PARALLEL} and {MARK}",
            f"{_PARALLEL} set, {MARK} missing",
            _CURE,
        )
    agent_store = environ.get(_AGENT) == "True"
    return read_agent(environ, Launcher.TORCH_NPU_RUN, agent_store=agent_store, cure=_CURE)
