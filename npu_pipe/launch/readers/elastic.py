"""What torch's elastic agent sets, for all launchers that are built on it.

Source: torch/distributed/elastic/agent/server/local_elastic_agent.py of torch 2.13
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from npu_pipe.launch.readers.env_init import read_five
from npu_pipe.launch.variables import is_set, whole_number
from npu_pipe.launch.world import Launcher, World

__all__ = ["MARK", "read_agent"]

# Never set by hand.
MARK = "TORCHELASTIC_RUN_ID"


def read_agent(
    environ: Mapping[str, str], launcher: Launcher, *, agent_store: bool, cure: str
) -> World:
    """The World that an agent describes. Raises ConfigError that names the variables."""
    restarts = 0
    if is_set(environ, "TORCHELASTIC_RESTART_COUNT"):
        restarts = whole_number(environ, "TORCHELASTIC_RESTART_COUNT", cure=cure)
    return dataclasses.replace(
        read_five(environ, launcher, cure=cure), restarts=restarts, agent_store=agent_store
    )
