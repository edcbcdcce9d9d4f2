"""What a host finds by itself, before its ranks meet others. Imports torch when it looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

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
    versions: Mapping[str, str | None] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def examine_host(
    world: World, environ: Mapping[str, str], *, wanted: str, local_ranks: int
) -> Alone:
    """Look at this host; needs nobody else, and starts nothing.

    environ: as the process was given it. wanted: kind of device. local_ranks: of this host.
    Raises ConfigError for a kind that nobody knows, and where torch does not load.
    """
    host, versions = this_host(), versions_here(cann_folders(environ))
    try:
        # Takes seconds; and of all commands, this one tells where it fails.
        from npu_pipe.device import choose, inventory
    except (ImportError, OSError) as error:
        raise ConfigError(
            "torch loads",
            f"{error} ({versions.told()})",
            "install it again: pip install --force-reinstall 'torch>=2.10,<2.14'",
        ) from error
    choose.require_known(wanted)
    findings = list(inventory.pairing_findings(versions, wanted=wanted))
    findings += inventory.device_findings(wanted, local_ranks=local_ranks)
    at = Surroundings(
        environ=environ,
        host=host,
        backend=choose.backend_of(wanted),
        local_ranks=local_ranks,
        is_bare=inventory.is_bare(versions),
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
        settings = hccl_settings(environ=at.environ)
    except ConfigError:  # found with the variables
        settings = None
    return port_findings(world, local_ranks=at.local_ranks, backend=at.backend, settings=settings)
