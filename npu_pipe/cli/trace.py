"""`npu-pipe trace`: where the time of a run went, next to what was predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from npu_pipe.cli.common import Output, parse_flags
from npu_pipe.cli.trace_json import to_json_value
from npu_pipe.cli.trace_table import print_analysis
from npu_pipe.errors import ConfigError
from npu_pipe.train.analysis import analyse, write_comparison
from npu_pipe.train.run_folder import RunFolder
from npu_pipe.train.window import read_window

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class TraceFlags:
    """Compare the last measured window of a run with its prediction.

    npu-pipe trace runs/gpt_tiny

    npu-pipe trace runs/gpt_tiny --svg picture.svg
    """

    folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """The folder of a run of npu-pipe train."""
    svg: Output = None
    """Draw predicted above measured, with the critical paths."""
    json: bool = False
    """Print everything as JSON instead."""


def run(argv: Sequence[str]) -> int:
    """The verb. Raises UsageError for a folder or file that is missing or wrong."""
    flags = parse_flags(TraceFlags, argv, verb="trace")
    analysis = analyse(read_window(_window_of(flags.folder)))
    if flags.json:
        print(json.dumps(to_json_value(analysis), allow_nan=False))
    else:
        print_analysis(analysis, name=str(flags.folder))
    if flags.svg is not None:
        write_comparison(analysis, flags.svg, folder=flags.folder)
    return 0


def _window_of(folder: Path) -> Path:
    run = RunFolder(folder)
    run.check_run()
    if not run.window.is_file():
        raise ConfigError(
            "a run that has ended leaves its last measured window in its folder",
            f"{run.window} is not there",
            "let the run reach its last update: npu-pipe train CONFIG --resume",
        )
    return run.window
