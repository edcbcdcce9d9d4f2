"""`npu-pipe plan`: compare all schedules for a workload, and say which to take."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from npu_pipe.cli.common import Count, Number, Output, parse_flags
from npu_pipe.cli.plan_json import to_json_value
from npu_pipe.cli.plan_table import print_comparison
from npu_pipe.errors import ConfigError
from npu_pipe.ir.files import save_schedule
from npu_pipe.planner.comparison import Comparison, compare
from npu_pipe.planner.limits import Limits
from npu_pipe.planner.workload import Workload
from npu_pipe.planner.workload_file import read_workload
from npu_pipe.train.bounds import at_least
from npu_pipe.train.run_folder import RunFolder

__all__ = ["run"]

_TIMES = ("forward", "input_grad", "weight_grad", "transfer")


@dataclass(frozen=True, slots=True)
class PlanFlags:
    """Compare all schedules for your costs and memory, and say which to take.

    npu-pipe plan -p 4 -m 8 --transfer 0.1

    npu-pipe plan -p 4 -m 32 --costs costs.toml --memory-gb 64

    npu-pipe plan -p 4 -m 32 --profile runs/gpt_tiny --save best.json
    """

    ranks: Annotated[int, arg(aliases=("-p",), metavar="N")]
    """Pipeline ranks."""
    microbatches: Annotated[int, arg(aliases=("-m",), metavar="N")]
    """Microbatches of one update."""
    forward: Number = None
    """Time of a forward of a rank's whole share of the model; 1 if left out."""
    input_grad: Number = None
    """Time of the input-gradient half of its backward; 1 if left out."""
    weight_grad: Number = None
    """Time of the weight-gradient half; 1 if left out."""
    transfer: Number = None
    """Time of one crossing between two ranks; 0 if left out."""
    costs: Output = None
    """A TOML file with the costs of each layer instead; see docs/planning.md."""
    profile: Output = None
    """The folder of a run, for the costs that it measured."""
    max_activations: Count = None
    """Most that a rank may hold, in activations of its whole share."""
    memory_gb: Number = None
    """Most that a rank may hold, in GB (1e9 bytes); needs bytes in --costs."""
    search_s: float = 5.0
    """Seconds to search for a better schedule; 0 for not at all."""
    seed: int = 0
    """Of the disturbances and the search."""
    save: Output = None
    """Write the schedule to take to this file."""
    json: bool = False
    """Print everything as JSON instead."""


def run(argv: Sequence[str]) -> int:
    """The verb. Raises UsageError for sizes, files, costs and limits that do not work."""
    flags = parse_flags(PlanFlags, argv, verb="plan")
    at_least(1, ranks=flags.ranks, microbatches=flags.microbatches)
    at_least(0, search_s=flags.search_s, seed=flags.seed)
    comparison = compare(
        _workload(flags),
        _limits(flags),
        ranks=flags.ranks,
        microbatches=flags.microbatches,
        search_s=flags.search_s,
        seed=flags.seed,
    )
    if flags.json:
        print(json.dumps(to_json_value(comparison), allow_nan=False))
    else:
        print_comparison(comparison)
    if flags.save is not None:
        _save(flags, comparison)
    return 0


def _workload(flags: PlanFlags) -> Workload:
    times = {name: getattr(flags, name) for name in _TIMES}
    given = {name: time for name, time in times.items() if time is not None}
    sources = [
        f"--{name.replace('_', '-')}"
        for name in ("costs", "profile", *given)
        if getattr(flags, name) is not None
    ]
    if len(sources) > 1 and (flags.costs or flags.profile):
        raise ConfigError(
            "costs come from one place: flags, a file or a profile",
            f"{' and '.join(sources)} were given",
            "leave all but one out",
        )
    if flags.costs is not None:
        return read_workload(flags.costs)
    if flags.profile is not None:
        path = RunFolder(flags.profile).costs
        if not path.is_file():
            raise ConfigError(
                "a run that has ended leaves its measured costs in its folder",
                f"{path} is not there",
                "give the folder of a run of npu-pipe train that reached its last update",
            )
        return read_workload(path)
    at_least(0, **given)
    return Workload.even(flags.ranks, **given)


def _limits(flags: PlanFlags) -> Limits:
    if flags.max_activations is not None:
        at_least(1, max_activations=flags.max_activations)
    if flags.memory_gb is None:
        return Limits(flags.max_activations)
    if not (math.isfinite(flags.memory_gb) and flags.memory_gb > 0):
        raise ConfigError(
            "memory_gb is more than 0", f"it is {flags.memory_gb}", "give what a rank may hold"
        )
    return Limits(flags.max_activations, flags.memory_gb * 1e9)


def _save(flags: PlanFlags, comparison: Comparison) -> None:
    chosen = comparison.advice.chosen
    if chosen is None:
        raise ConfigError("--save writes the schedule to take", "there is none", "raise the limit")
    assert flags.save is not None
    save_schedule(chosen.schedule, flags.save)
    print(f"wrote {chosen.name} to {flags.save}", file=sys.stderr)
