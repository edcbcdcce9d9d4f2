"""What was found, as a value, as JSON and on one screen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from npu_pipe.doctor.clocks import clock_finding
from npu_pipe.doctor.diagnosis import (
    Diagnosis,
    Link,
    RankFacts,
    disagreements,
    merged,
    told_ranks,
)
from npu_pipe.doctor.document import found_together, to_json_value
from npu_pipe.doctor.links import link_findings
from npu_pipe.doctor.screen import lines
from npu_pipe.doctor.subject import Subject, diagnosis_of
from npu_pipe.errors import ConfigError
from npu_pipe.finding import Finding, Verdict, may_start, refusal
from npu_pipe.launch.mesh import Mesh
from npu_pipe.launch.world import Launcher, Sources, World
from npu_pipe.schedules.registry import build_schedule

FINE = Finding("memory", "enough")
WARNED = Finding("variables", "X=1: slow", Verdict.WARN, "unset X")
REFUSED = Finding("devices", "none", Verdict.REFUSE, "plug one in")
LINK = Link(0, 1, 50.0, 1.0, 1.1, 0.9, is_correct=True, is_near=True, is_slow=False)


def a_diagnosis(mesh: Mesh, *findings: Finding, links: tuple[Link, ...] = ()) -> Diagnosis:
    schedule = build_schedule("1f1b", ranks=mesh.pp, microbatches=2 * mesh.pp)
    world = World(
        rank=0,
        size=mesh.size,
        local_rank=0,
        address="node0",
        port=29500,
        launcher=Launcher.TORCHRUN,
        sources=Sources(
            rank="RANK",
            size="WORLD_SIZE",
            local_rank="LOCAL_RANK",
            address="MASTER_ADDR",
            port="MASTER_PORT",
        ),
    )
    facts = tuple(
        RankFacts(rank, f"node{rank // 4}", rank % 4, f"x:{rank % 4}", 64 << 30, 60 << 30)
        for rank in range(mesh.size)
    )
    start = diagnosis_of(Subject(mesh, schedule, "auto"), world, findings)
    return replace(start, facts=facts, links=links, versions={"torch": "2.13.0", "cann": None})


def screen(diagnosis: Diagnosis, width: int = 100) -> list[str]:
    return [text for text, _ in lines(diagnosis, width=width)]


def test_only_what_is_refused_keeps_training_from_starting() -> None:
    assert may_start([])
    assert may_start([FINE, WARNED])
    assert not may_start([FINE, REFUSED])


def test_an_error_is_a_finding_with_its_cure() -> None:
    found = refusal("lanes", ConfigError("the rule", "the facts", "the cure"))
    assert found == Finding("lanes", "the rule; the facts", Verdict.REFUSE, "the cure")


def test_what_ranks_found_alike_is_one_finding_with_its_ranks() -> None:
    found = merged([[FINE, WARNED], [WARNED, FINE], [FINE], [FINE, REFUSED]])
    assert [(each.name, each.ranks) for each in found] == [
        ("memory", (0, 1, 2, 3)),
        ("variables", (0, 1)),
        ("devices", (3,)),
    ]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([0, 2, 3, 4, 9], "ranks 0, 2-4, 9")],
)
def test_ranks_are_told_in_runs(ranks: list[int], text: str) -> None:
    assert told_ranks(ranks) == text


def test_what_differs_between_ranks_is_told_with_all_values() -> None:
    found = disagreements(
        "variables",
        [{"A": "1", "B": "2"}, {"A": "1", "B": "2"}, {"A": "1", "B": "3"}, {"A": "1"}],
        verdict=Verdict.WARN,
        cure="set it alike",
    )
    facts = "B is 2 on ranks 0-1, 3 on rank 2, not set on rank 3"
    assert found == (Finding("variables", facts, Verdict.WARN, "set it alike"),)


def test_wrong_bytes_are_refused_and_slow_links_are_warned_of_by_their_ranks() -> None:
    links = (LINK, replace(LINK, low=1, high=2, is_correct=False), replace(LINK, low=2, high=3))
    told, wrong = link_findings(links, ranks=4)
    assert told.verdict is Verdict.OK
    assert "3 within a host: 50 us, 1.00 GB/s down, 1.10 up, 0.90 each" in told.facts
    assert wrong.verdict is Verdict.REFUSE
    assert wrong.facts.endswith("between 1-2")
    _, slow = link_findings((LINK, replace(LINK, low=1, high=2, is_slow=True)), ranks=3)
    assert slow.verdict is Verdict.WARN
    assert slow.facts.endswith("1-2")
    (alone,) = link_findings((), ranks=1)
    assert alone.facts == "one rank has nobody to send to"


def test_the_screen_tells_coordinates_stages_and_groups_of_each_rank() -> None:
    text = screen(a_diagnosis(Mesh(dp=2, pp=2, tp=2), FINE))
    (at,) = [number for number, line in enumerate(text) if "(dp, pp, tp)" in line]
    rows = [line.split("  ") for line in text[at : at + 9]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["rank", "host", "device", "(dp, pp, tp)", "stages", "dp", "pp", "tp"]
    assert cells[1] == ["0", "node0", "x:0", "(0, 0, 0)", "0", "0 4", "0 2", "0 1"]
    assert cells[4] == ["3", "node0", "x:3", "(0, 1, 1)", "1", "3 7", "1 3", "2 3"]
    assert cells[8] == ["7", "node1", "x:3", "(1, 1, 1)", "1", "3 7", "5 7", "6 7"]


def test_the_screen_tells_where_each_value_of_the_launcher_came_from() -> None:
    text = "\n".join(screen(a_diagnosis(Mesh(pp=2)), width=200))
    assert "torchrun: rank 0 (RANK), size 2 (WORLD_SIZE), local rank 0 (LOCAL_RANK)" in text
    assert "address node0 (MASTER_ADDR), port 29500 (MASTER_PORT)" in text


def test_the_screen_ends_with_whether_training_may_start() -> None:
    assert screen(a_diagnosis(Mesh(pp=2), FINE))[-1] == "training may start"
    assert screen(a_diagnosis(Mesh(pp=2), WARNED))[-1] == "training may start: 1 warning"
    last = screen(a_diagnosis(Mesh(pp=2), REFUSED, WARNED, WARNED))[-1]
    assert last == "training may not start: 1 problem, 2 warnings"


def test_a_finding_of_some_ranks_names_them_and_has_its_cure() -> None:
    found = replace(REFUSED, ranks=(2, 3))
    text = screen(a_diagnosis(Mesh(pp=4), found))
    assert "x devices    ranks 2-3: none; plug one in" in text


def test_a_large_job_still_fits_on_one_screen() -> None:
    mesh = Mesh(dp=4, pp=16, tp=8)
    slow = replace(LINK, low=300, high=308, is_slow=True)
    links = (*(replace(LINK, low=r, high=r + 8) for r in range(300)), slow)
    facts = (Finding("memory", f"{n} GiB", ranks=(8 * n,)) for n in range(64))
    text = screen(a_diagnosis(mesh, *facts, *link_findings(links, ranks=512), links=links))
    assert len(text) < 50
    assert max(map(len, text)) <= 120
    assert any("300-308" in line and "slow" in line for line in text)
    assert any("504 more (--json has all)" in line for line in text)


def test_the_document_has_one_form_and_can_be_read_again() -> None:
    found = a_diagnosis(Mesh(dp=1, pp=2, tp=1), FINE, WARNED, links=(LINK,))
    value = json.loads(json.dumps(to_json_value(found), allow_nan=False))
    assert (value["format"], value["version"], value["may_start"]) == ("npu_pipe.doctor", 1, True)
    assert {key: sorted(value[key]) for key in ("launcher", "mesh")} == {
        "launcher": ["address", "local_rank", "name", "port", "rank", "size", "sources"],
        "mesh": ["dp", "pp", "ranks", "schedule", "tp"],
    }
    assert sorted(value) == [
        *("findings", "format", "launcher", "links", "may_start", "mesh", "ranks", "variables"),
        *("version", "versions"),
    ]
    assert sorted(value["findings"][0]) == ["cure", "facts", "name", "ranks", "verdict"]
    assert sorted(value["links"][0]) == [
        *("both_gb_s", "down_gb_s", "high", "is_correct", "is_near", "is_slow", "latency_us"),
        *("low", "up_gb_s"),
    ]
    assert value["mesh"]["ranks"][1] == {
        "rank": 1,
        "dp": 0,
        "pp": 1,
        "tp": 0,
        "stages": [1],
        "groups": {"dp": [1], "pp": [0, 1], "tp": [1]},
    }
    findings, facts, links = found_together(value)
    assert findings == found.findings
    assert facts == found.facts
    assert links == found.links


@pytest.mark.parametrize(
    ("behind_s", "verdict", "words"),
    [(0.02, Verdict.OK, "node1 -20 ms"), (3.0, Verdict.WARN, "node1 -3000 ms")],
)
def test_clocks_of_hosts_that_are_far_apart_are_told(
    behind_s: float, verdict: Verdict, words: str
) -> None:
    def gather(value: float | None) -> list[float | None]:
        """Of four ranks on two hosts."""
        return [value, value, *[None if value is None else value - behind_s] * 2]

    names, machines = ["node0"] * 2 + ["node1"] * 2, ["a", "a", "b", "b"]
    found = clock_finding(gather, hosts=names, machines=machines)
    assert found.verdict is verdict
    assert words in found.facts
    assert found.facts.startswith("of the hosts, against rank 0's: node0 +0 ms")
    assert bool(found.cure) == (verdict is Verdict.WARN)


def test_hosts_are_told_apart_by_more_than_their_names() -> None:
    alike = clock_finding(lambda value: [value] * 2, hosts=["x", "x"], machines=["a", "b"])
    assert "x +0 ms, x +0 ms" in alike.facts
    one = clock_finding(lambda value: [value] * 2, hosts=["x", "x"], machines=["a", "a"])
    assert one == Finding("clocks", "one host, one clock")
