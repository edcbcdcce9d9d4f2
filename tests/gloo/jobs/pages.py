"""Jobs that run the Python of a page of documentation, as a rank of torchrun would."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from npu_pipe import World


def run_blocks(world: World, *, codes: list[str], folder: str) -> list[str]:
    """Run the blocks one after another, as one program. Returns what each has printed."""
    before, home = dict(os.environ), Path.cwd()
    place = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "MASTER_ADDR": world.address,
        "MASTER_PORT": str(world.port),
        "TORCHELASTIC_RUN_ID": "pages",
        "TORCHELASTIC_RESTART_COUNT": str(world.restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ.update(place)
    os.chdir(folder)
    names = {"__name__": "__main__"}
    printed = []
    try:
        for code in codes:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(code, "page", "exec"), names)
            printed.append(output.getvalue())
    finally:
        os.chdir(home)
        os.environ.clear()
        os.environ.update(before)
    return printed
