"""Workloads as files, and as runs leave them in their folders."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from npu_pipe import Costs, build_schedule, lower, simulate
from npu_pipe.cli.main import main
from npu_pipe.errors import ConfigError, CostsError
from npu_pipe.planner.workload import Workload
from npu_pipe.planner.workload_file import read_workload, write_workload
from npu_pipe.train.job import Job
from npu_pipe.train.plan import PipelineConfig
from npu_pipe.train.profile import profile
from npu_pipe.train.run_folder import RunFolder
from npu_pipe.train.toml import to_toml


def test_a_file_of_costs_gives_its_workload_back(tmp_path: Path) -> None:
    full = Workload(
        forward=[1, 2.5],
        input_grad=[1, 2],
        weight_grad=[1, 1e-3],
        transfer=[1 / 3],
        activation_bytes=[1e9, 2e9],
        weight_input_bytes=[1, 2],
        parameter_bytes=[3, 4],
        boundary_bytes=[7],
        microbatch_scale=[1, 2, 0.5],
        recompute=[0, 1],
        overlapped=False,
        fused_ratio=0.8,
        has_halves=False,
    )
    for workload in (full, Workload.even(2), Workload([1], [1], [1], [])):
        write_workload(workload, tmp_path / "costs.toml")
        assert read_workload(tmp_path / "costs.toml") == workload


GOOD = {"forward": "[1]", "input_grad": "[1]", "weight_grad": "[1]", "transfer": "[]"}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ({"forwrd": "[1]"}, "has 'forwrd'; did you mean 'forward'?"),
        ({"activations_bytes": "[1]"}, "did you mean 'activation_bytes'?"),
        ({"stage.x": "1"}, "has 'stage'; take it out"),
        ({"input_grad": None}, "has no 'input_grad'; add input_grad = [...]"),
        ({"forward": "1"}, "forward is a list of numbers"),
        ({"forward": "[true]"}, "forward is a list of numbers"),
        ({"forward": "['1']"}, "forward is a list of numbers"),
        ({"overlapped": "1"}, "overlapped is true or false"),
        ({"fused_ratio": "[1]"}, "fused_ratio is a number"),
        ({"forward": "[1"}, "costs are read from a TOML file"),
        ({"forward": "[" * 100_000}, "costs are read from a TOML file"),
    ],
)
def test_mistakes_in_a_file_of_costs(
    tmp_path: Path, lines: dict[str, str | None], says: str
) -> None:
    path = tmp_path / "costs.toml"
    given = {key: value for key, value in (GOOD | lines).items() if value is not None}
    path.write_text("".join(f"{key} = {value}\n" for key, value in given.items()))
    with pytest.raises(ConfigError) as error:
        read_workload(path)
    assert says in str(error.value)


def test_values_that_do_not_fit_are_refused_by_the_workload(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text("forward = [1, 1]\ninput_grad = [1]\nweight_grad = [1, 1]\ntransfer = [0]\n")
    with pytest.raises(CostsError, match="give 2 values for input_grad"):
        read_workload(path)


# Costs from a run

COSTS = Costs(
    forward=[100, 200, 300, 150],
    input_grad=[120, 210, 290, 160],
    weight_grad=[80, 190, 330, 140],
    transfer=[10, 20, 30],
)


def measured(name: str) -> Workload:
    schedule = build_schedule(name, ranks=4, microbatches=8)
    return profile(simulate(lower(schedule, COSTS), COSTS))


def test_a_run_with_split_backwards_gives_its_costs_back() -> None:
    found = measured("zb-h1")
    assert found.forward == pytest.approx(COSTS.forward)
    assert found.input_grad == pytest.approx(COSTS.input_grad)
    assert found.weight_grad == pytest.approx(COSTS.weight_grad)
    assert found.transfer == pytest.approx(COSTS.transfer)
    assert found.has_halves


def test_whole_backwards_are_halved_and_the_plan_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = measured("1f1b")
    assert not found.has_halves
    assert found.input_grad == found.weight_grad
    assert found.input_grad == pytest.approx([100, 200, 310, 150])
    write_workload(found, RunFolder(tmp_path).costs)
    words = ["-p", "4", "-m", "8", "--profile", str(tmp_path), "--search-s", "0"]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "The measured run had whole backwards" in out
    assert "makespan" in out
    told = " ".join(out.split())
    assert "zb-v, v-half, v-min, dualpipe-v: 4 layers were given for 8 stages; use at most" in told
    assert "or a model of more layers" in told, "the cure is told to its end"


def test_all_times_of_a_plan_are_in_one_unit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Some are below 1000 ms, and some above."""
    even = ", ".join(["30_000"] * 4)
    text = "".join(f"{name} = [{even}]\n" for name in ("forward", "input_grad", "weight_grad"))
    (tmp_path / "costs.toml").write_text(f"{text}transfer = [0, 0, 0]\n")
    words = ["-p", "4", "-m", "8", "--costs", str(tmp_path / "costs.toml"), "--search-s", "1"]
    assert main(["plan", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "makespan 810 ms, bound 810 ms, proved best" in out
    assert "zb-h2 has the shorter span, 720 ms against 810" in out
    assert " s," not in out.partition("Take ")[2]


def test_a_run_knows_its_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_workload(measured("zb-h1"), run.costs)
    job = Job(pipeline=PipelineConfig(ranks=4, microbatches=8))
    run.config.write_text(to_toml(job), encoding="utf-8")

    def sizes(*words: str) -> tuple[int, int]:
        assert main(["plan", "--profile", str(tmp_path), "--search-s", "0", "--json", *words]) == 0
        plan = json.loads(capsys.readouterr().out)
        return plan["ranks"], plan["microbatches"]

    assert sizes() == (4, 8)
    assert sizes("-p", "2") == (2, 8)
    assert sizes("-p", "2", "-m", "6") == (2, 6)
    assert main(["plan", "--profile", str(tmp_path / "none")]) == 2
    assert "none is not there; give the run.folder of a run" in capsys.readouterr().err


# The page


def test_the_file_and_the_code_of_the_page_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "costs.toml").write_text(shown, encoding="utf-8")
    workload = read_workload(tmp_path / "costs.toml")
    given = {field.name for field in fields(workload) if f"\n{field.name} = " in f"\n{shown}"}
    assert given == {field.name for field in fields(Workload)} - {"has_halves"}
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    exec(code, {})
    assert capsys.readouterr().out.startswith("Take ")
