"""What the ranks find together: clocks, agreement, and how they reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from npu_pipe.comm.team import Team
from npu_pipe.device.choose import choose
from npu_pipe.device.device import Device
from npu_pipe.device.inventory import device_facts, room_on
from npu_pipe.device.versions import COMPARED, PAIRED
from npu_pipe.doctor.alone import Alone
from npu_pipe.doctor.clocks import clock_finding
from npu_pipe.doctor.diagnosis import Diagnosis, Link, RankFacts, disagreements, merged
from npu_pipe.doctor.document import finding_from_json
from npu_pipe.doctor.links import link_findings
from npu_pipe.doctor.transfers import neighbours, try_links
from npu_pipe.errors import ConfigError
from npu_pipe.finding import Finding, Verdict, refusal
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.host import machine_id
from npu_pipe.launch.mesh import Mesh
from npu_pipe.launch.preflight import preflight
from npu_pipe.launch.settings import OWN
from npu_pipe.launch.store import open_store
from npu_pipe.launch.world import World

__all__ = ["examine_together"]


def examine_together(
    world: World,
    alone: Alone,
    diagnosis: Diagnosis,
    *,
    schedule: Schedule,
    wanted: str,
    timeout_s: float,
) -> Diagnosis:
    """Meet all ranks and try what lies between them; collective, the same value on every rank.

    alone: what this rank found by itself. schedule: of each pipeline of the mesh. timeout_s: for
    ranks to come, and for one that hangs. Raises PeerError when a rank does not come, or fails.
    """
    own, device = _own_device(world, diagnosis.mesh, schedule, wanted)
    team = Team(
        world.rank,
        world.size,
        address=world.address,
        open_store=lambda: open_store(world, timeout_s=timeout_s),
        timeout_s=timeout_s,
        connect_s=timeout_s,
    )
    try:
        facts, taken = _facts(world, alone, device)
        answers = team.gather(
            {
                "findings": [asdict(each) for each in (*alone.findings, *own, *taken)],
                "facts": asdict(facts),
                "machine": machine_id(),
                "kind": None if device is None else device.place.type,
                "versions": dict(alone.versions),
                "variables": dict(alone.variables),
            }
        )
        found = merged(
            [[finding_from_json(each) for each in answer["findings"]] for answer in answers]
        )
        everybody = tuple(RankFacts(**answer["facts"]) for answer in answers)
        found += _agreement(answers)
        hosts, machines = [each.host for each in everybody], [a["machine"] for a in answers]
        found += (clock_finding(team.gather, hosts=hosts, machines=machines),)
        links: tuple[Link, ...] = ()
        if device is not None and all(answer["kind"] == device.place.type for answer in answers):
            links = try_links(team, device, neighbours(diagnosis.mesh, schedule), machines)
            found += link_findings(links, ranks=world.size)
        return replace(
            diagnosis,
            versions=answers[0]["versions"],
            variables=answers[0]["variables"],
            findings=(*diagnosis.findings, *found),
            facts=everybody,
            links=links,
        )
    finally:
        team.close()


def _own_device(
    world: World, mesh: Mesh, schedule: Schedule, wanted: str
) -> tuple[list[Finding], Device | None]:
    """The device of this rank, selected, and what its groups take; None if there is none."""
    try:
        device = choose(wanted, index=world.local_rank).device
        device.select()
    except ConfigError as error:
        return [refusal("devices", error)], None
    try:
        told = preflight(
            schedule,
            backend=device.backend,
            local_rank=world.local_rank,
            mesh=mesh,
            room_bytes=room_on(device),
        )
    except ConfigError as error:
        return [refusal("lanes", error)], device
    return ([] if told is None else [Finding("lanes", told)]), device


def _facts(
    world: World, alone: Alone, device: Device | None
) -> tuple[RankFacts, tuple[Finding, ...]]:
    if device is None:
        facts = RankFacts(world.rank, alone.host, world.local_rank, "none", None, None)
        return facts, ()
    found, taken = device_facts(device)
    return (
        RankFacts(
            world.rank,
            alone.host,
            world.local_rank,
            str(device.place),
            found.total_bytes,
            found.free_bytes,
        ),
        taken,
    )


def _agreement(answers: Sequence[dict[str, Any]]) -> tuple[Finding, ...]:
    kinds = [{"kind of device": answer["kind"]} for answer in answers]
    variables = [
        {name: text for name, text in answer["variables"].items() if name not in OWN}
        for answer in answers
    ]
    return (
        *disagreements(
            "devices", kinds, verdict=Verdict.REFUSE, cure="give all ranks devices of one kind"
        ),
        *(
            finding
            for verdict, names in ((Verdict.REFUSE, COMPARED), (Verdict.WARN, PAIRED))
            for finding in disagreements(
                "versions",
                [{name: answer["versions"].get(name) for name in names} for answer in answers],
                verdict=verdict,
                cure="install the same on all hosts",
            )
        ),
        *disagreements(
            "variables", variables, verdict=Verdict.WARN, cure="set it alike on all ranks"
        ),
    )
