"""What a host finds by itself, before its ranks meet others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from npu_pipe.device.choose import KINDS, choose
from npu_pipe.device.inventory import device_findings, is_bare, pairing_findings
from npu_pipe.device.versions import versions_here
from npu_pipe.errors import ConfigError
from npu_pipe.finding import Finding
from npu_pipe.launch.host import memory_finding, this_host
from npu_pipe.launch.ports import port_findings
from npu_pipe.launch.preflight import hccl_settings
from npu_pipe.launch.settings import setting_findings, values_found
from npu_pipe.launch.surroundings import Surroundings, cann_folders
from npu_pipe.launch.world import Launcher, World

__all__ = ["Alone", "examine_host"]


@dataclass(frozen=True, slots=True)
class Alone:
    """host: its name."""

    host: str
    versions: Mapping[str, str | None]
    variables: Mapping[str, str]
    findings: tuple[Finding, ...]


def examine_host(
    world: World, environ: Mapping[str, str], *, wanted: str, local_ranks: int
) -> Alone:
    """Look at this host; needs nobody else, and starts nothing.

    environ: as the process was given it. wanted: kind of device. local_ranks: of this host.
    Raises ConfigError for a kind that nobody knows.
    """
    if wanted not in KINDS:
        choose(wanted, index=0)
    versions = versions_here(cann_folders(environ))
    findings = list(pairing_findings(versions, wanted=wanted))
    findings += device_findings(wanted, local_ranks=local_ranks)
    host = this_host()
    at = Surroundings(
        environ=environ,
        host=host,
        backend=_backend(wanted),
        local_ranks=local_ranks,
        is_bare=is_bare(versions),
        is_msrun=world.launcher is Launcher.MSRUN,
        is_alone=world.launcher in (Launcher.ONE_PROCESS, Launcher.LOCAL),
    )
    if world.local_rank == 0:  # once a host
        findings.append(memory_finding(host, local_ranks=local_ranks))
        findings += _ports(world, at)
    findings += setting_findings(at)
    return Alone(host.name, asdict(versions), values_found(at), tuple(findings))


def _ports(world: World, at: Surroundings) -> tuple[Finding, ...]:
    try:
        settings = hccl_settings(at.environ)
    except ConfigError:  # found with the variables
        settings = None
    return port_findings(world, local_ranks=at.local_ranks, backend=at.backend, settings=settings)


def _backend(wanted: str) -> str:
    """That its devices use; that of the CPU where there is no device of the kind."""
    try:
        return choose(wanted, index=0).device.backend
    except ConfigError:
        return choose("cpu", index=0).device.backend
