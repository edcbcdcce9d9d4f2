"""`npu-pipe plan`: compare all schedules for a workload, and say which to take."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from tyro.conf import Positional, arg

from npu_pipe.cli.common import Count, Number, Output, parse_flags
from npu_pipe.cli.plan_json import to_json_value
from npu_pipe.cli.plan_table import print_comparison
from npu_pipe.errors import ConfigError
from npu_pipe.ir.files import save_schedule
from npu_pipe.planner.comparison import Comparison, compare
from npu_pipe.planner.limits import Limits
from npu_pipe.planner.workload import Workload
from npu_pipe.planner.workload_file import read_workload
from npu_pipe.schedules.sizes import check_sizes
from npu_pipe.train.bounds import at_least
from npu_pipe.train.cluster import check_cluster
from npu_pipe.train.data import check_data
from npu_pipe.train.dry_run import room_of
from npu_pipe.train.estimate import workload_of
from npu_pipe.train.job import Job
from npu_pipe.train.model_config import check_model
from npu_pipe.train.run_folder import RunFolder
from npu_pipe.train.toml import read_toml

__all__ = ["run"]

_MANY = 50_000  # actions, of which a comparison takes longer than one waits without a word
_TIMES = ("forward", "input_grad", "weight_grad", "transfer")


@dataclass(frozen=True, slots=True)
class PlanFlags:
    """Compare all schedules for your costs and memory, and say which to take.

    npu-pipe plan -p 4 -m 8 --transfer 0.1

    npu-pipe plan -p 4 -m 32 --costs costs.toml --memory-gb 64

    npu-pipe plan --profile runs/gpt_tiny --save best.json

    npu-pipe plan configs/clusters/llama_8b_16.toml
    """

    config: Annotated[Positional[Output], arg(metavar="CONFIG")] = None
    """A job's TOML file, for costs and memory estimated from its shapes and its [cluster]."""
    ranks: Annotated[Count, arg(aliases=("-p",))] = None
    """Pipeline ranks; those of CONFIG or of the run if left out."""
    microbatches: Annotated[Count, arg(aliases=("-m",))] = None
    """Microbatches of one update; those of CONFIG or of the run if left out."""
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
    """Most that a rank may hold, in GB (1e9 bytes); needs bytes in --costs. Of CONFIG, what is
    left of its device beside buffers and reserve."""
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
    at_least(0, search_s=flags.search_s, seed=flags.seed)
    job = _job(flags)
    ranks, microbatches = _sizes(flags, job)
    check_sizes(ranks, microbatches)
    actions = 3 * ranks * microbatches
    if actions > _MANY:
        print(
            f"npu-pipe: comparing schedules of {actions:,} actions each; this may take minutes",
            file=sys.stderr,
        )
    estimated = None if flags.costs or flags.profile or _times(flags) else job
    comparison = compare(
        _workload(flags, estimated, ranks),
        _limits(flags, estimated),
        ranks=ranks,
        microbatches=microbatches,
        search_s=flags.search_s,
        seed=flags.seed,
    )
    if flags.json:
        print(json.dumps(to_json_value(comparison), allow_nan=False))
    else:
        print_comparison(comparison)
        if estimated is not None:
            print(f"\n{_told(estimated)}")
    if flags.save is not None:
        _save(flags, comparison)
    return 0


def _job(flags: PlanFlags) -> Job | None:
    """The job of CONFIG, or else of the run where a size is left out, with the sizes of the
    flags. Raises UsageError."""
    config = flags.config
    if config is None and flags.profile is not None and None in (flags.ranks, flags.microbatches):
        run = RunFolder(flags.profile)
        run.check_run()
        config = run.config
    if config is None:
        return None
    job = read_toml(Job, config)
    ranks = job.pipeline.ranks if flags.ranks is None else flags.ranks
    microbatches = job.pipeline.microbatches if flags.microbatches is None else flags.microbatches
    pipeline = replace(job.pipeline, ranks=ranks, microbatches=microbatches)
    job = replace(job, pipeline=pipeline)
    check_model(job.model)
    check_data(job.data)
    check_cluster(job.cluster)
    return job


def _sizes(flags: PlanFlags, job: Job | None) -> tuple[int, int]:
    if job is not None:
        return job.pipeline.ranks, job.pipeline.microbatches
    if flags.ranks is None or flags.microbatches is None:
        missing = "--ranks (-p)" if flags.ranks is None else "--microbatches (-m)"
        raise ConfigError(
            "schedules are compared for a number of ranks and of microbatches",
            f"plan came without {missing}",
            "for example: npu-pipe plan -p 4 -m 8, or npu-pipe plan CONFIG",
        )
    return flags.ranks, flags.microbatches


def _told(job: Job) -> str:
    return (
        "Times, in us where no unit stands, and bytes are estimates, from the model's shape and\n"
        f"of {job.cluster}.\nSet [cluster]; after a run, --profile has what it measured."
    )


def _workload(flags: PlanFlags, estimated: Job | None, ranks: int) -> Workload:
    given = _times(flags)
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
    if estimated is not None:
        return workload_of(estimated)
    at_least(0, **given)
    return Workload.even(ranks, **given)


def _limits(flags: PlanFlags, estimated: Job | None) -> Limits:
    if flags.max_activations is not None:
        at_least(1, max_activations=flags.max_activations)
    if flags.memory_gb is None:
        room = None if estimated is None else room_of(estimated)
        return Limits(flags.max_activations, room)
    if not (math.isfinite(flags.memory_gb) and flags.memory_gb > 0):
        raise ConfigError(
            "memory_gb is more than 0", f"it is {flags.memory_gb}", "give what a rank may hold"
        )
    return Limits(flags.max_activations, flags.memory_gb * 1e9)


def _times(flags: PlanFlags) -> dict[str, float]:
    times = {name: getattr(flags, name) for name in _TIMES}
    return {name: time for name, time in times.items() if time is not None}


def _save(flags: PlanFlags, comparison: Comparison) -> None:
    chosen = comparison.advice.chosen
    if chosen is None:
        raise ConfigError("--save writes the schedule to take", "there is none", "raise the limit")
    assert flags.save is not None
    save_schedule(chosen.schedule, flags.save)
    print(f"wrote {chosen.name} to {flags.save}", file=sys.stderr)
