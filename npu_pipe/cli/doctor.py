"""npu-pipe doctor [CONFIG]: is everything as training needs it? On one screen, before any hang."""

from __future__ import annotations

import io
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from npu_pipe.cli.common import Count, Output, parse_flags
from npu_pipe.cli.job_command import path_options
from npu_pipe.doctor.alone import Alone, examine_host
from npu_pipe.doctor.answer import answer, document_of, stdout_kept
from npu_pipe.doctor.diagnosis import Diagnosis
from npu_pipe.doctor.document import found_together
from npu_pipe.doctor.rank import TIMEOUT_S, command_of
from npu_pipe.doctor.subject import diagnosis_of, read_subject
from npu_pipe.errors import ConfigError, RunError
from npu_pipe.finding import Finding, Verdict, refusal
from npu_pipe.launch.guard import guard
from npu_pipe.launch.local import LocalJob, run_local
from npu_pipe.launch.say import say
from npu_pipe.launch.surroundings import given_environment
from npu_pipe.launch.world import Launcher, World

__all__ = ["DoctorFlags", "run"]

_ASKED_TO_END = [128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@dataclass(frozen=True, slots=True)
class DoctorFlags:
    """Look at versions, devices, memory, launcher, mesh, ports, variables and clocks, and try the
    transfers between neighbours. Status 0: training may start; 1: it may not.

    npu-pipe doctor

    npu-pipe doctor configs/gpt_tiny.toml --json

    torchrun --nproc-per-node 8 -m npu_pipe doctor job.toml
    """

    config: Annotated[tyro.conf.Positional[Output], tyro.conf.arg(metavar="[CONFIG]")] = None
    """A job's TOML file, for its ranks, mesh and device."""
    ranks: Count = None
    """Ranks to start here, without a launcher; the job's if left out."""
    device: str | None = None
    """Kind of device, as train takes it; the job's if left out."""
    port: Count = None
    """Where the ranks of this machine meet; a free port if left out."""
    json: bool = False
    """Print one JSON document instead, whatever happens."""


def run(args: Sequence[str]) -> int:
    """The verb. Raises UsageError for flags and a job file that are wrong in themselves."""
    try:
        flags = parse_flags(DoctorFlags, args, verb="doctor")
    except SystemExit as left:
        if left.code and "--json" in args:
            print(document_of(left))
        raise
    problems: list[Finding] = []
    try:
        world = World.from_environment()
    except ConfigError as error:
        world, problems = World.single(), [refusal("launcher", error)]
    if world.launcher is Launcher.ONE_PROCESS:
        return answer(lambda: _on_this_host(flags, world, problems), as_json=flags.json)
    with guard(world):
        if world.rank == 0:
            return answer(lambda: _together(flags, world), as_json=flags.json)
        with stdout_kept():
            return 0 if _together(flags, world).may_start else 1


def _on_this_host(flags: DoctorFlags, world: World, problems: Sequence[Finding]) -> Diagnosis:
    """Look at it, and have ranks on it try the transfers, unless something is in their way."""
    subject = read_subject(flags.config, ranks=flags.ranks, device=flags.device, started=False)
    alone = examine_host(
        world, given_environment(), wanted=subject.wanted, local_ranks=subject.mesh.size
    )
    found = _with_host(diagnosis_of(subject, world, problems), alone)
    if not found.may_start:
        why = "not tried: what is refused comes first"
        return found.with_findings([Finding("transfers", why, Verdict.WARN)])
    if sys.stderr.isatty() and not flags.json:
        say("npu-pipe: trying the transfers, which takes some seconds")
    with tempfile.TemporaryDirectory() as folder:
        results, said = Path(folder) / "results.json", io.StringIO()
        command = command_of(
            results, device=subject.wanted, ranks=subject.mesh.size, config=flags.config
        )
        with redirect_stderr(said):
            status = run_local(
                [sys.executable, *path_options(), *command],
                ranks=subject.mesh.size,
                job=LocalJob(port=flags.port),
            )
        if status in _ASKED_TO_END:
            raise SystemExit(status)
        if status or not results.is_file():
            facts = " ".join(said.getvalue().split()) or f"the ranks ended with status {status}"
            cure = "mend that first: training would end in the same way"
            return found.with_findings([Finding("transfers", facts, Verdict.REFUSE, cure)])
        findings, facts_of_ranks, links = found_together(json.loads(results.read_text()))
    more = [each for each in findings if each.name not in ("launcher", "mesh")]
    return replace(found, facts=facts_of_ranks, links=links).with_findings(more)


def _together(flags: DoctorFlags, world: World) -> Diagnosis:
    """As one of the ranks that a launcher has started. Raises RunError where rank 0, which tells,
    may not hear of it."""
    subject = read_subject(flags.config, ranks=world.size, device=flags.device, started=True)
    alone = examine_host(
        world, given_environment(), wanted=subject.wanted, local_ranks=world.local_size or 1
    )
    found = diagnosis_of(subject, world)
    from npu_pipe.doctor.together import examine_together  # torch takes seconds to import

    try:
        return examine_together(
            world,
            alone,
            found,
            schedule=subject.schedule,
            wanted=subject.wanted,
            timeout_s=TIMEOUT_S,
        )
    except RunError as error:
        if world.rank != 0:
            raise
        return _with_host(found, alone).with_findings([refusal("transfers", error)])


def _with_host(found: Diagnosis, alone: Alone) -> Diagnosis:
    found = replace(found, versions=alone.versions, variables=alone.variables)
    return found.with_findings(alone.findings)
