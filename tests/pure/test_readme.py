"""The pages for users say what this version does: their code runs, and prints what they show."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from npu_pipe import Costs, build_schedule, simulate
from npu_pipe.cli.main import main
from npu_pipe.schedules.registry import FAMILIES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
GUIDES = (DOCS / "guide.md", DOCS / "guide.zh-CN.md")
CLUSTERS = (DOCS / "clusters.md", DOCS / "clusters.zh-CN.md")
PAGES = (*READMES, ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md")))
COMMANDS = (
    "pip install -e . && npu-pipe train configs/gpt_tiny.toml",
    "pip install -e '.[test]' && pytest",
)
ROW = re.compile(r"^\| `(\S+)` \| (\d+)[^|]* \| ([\d.]+) \| ([\d.]+) % \| ([\d. ]+) \|$", re.M)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, content) of each fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def name_of(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_the_two_commands_stand_there_once_as_lines_of_their_own(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [lines.count(command) for command in COMMANDS] == [1, 1]
    assert [sum(command in line for line in lines) for command in COMMANDS] == [1, 1]


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_python_without_torch_runs_and_prints_what_is_shown(page: Path) -> None:
    tried = 0
    for (language, code), (next_language, shown) in pairwise([*blocks(page), ("", "")]):
        if language == "python" and "torch" not in code:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, page.name, "exec"), {"__name__": "__main__"})
            assert next_language == "text"
            assert printed.getvalue() == shown
            tried += 1
    assert tried == 1


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_show_prints_what_is_shown(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [content for language, content in blocks(page) if content.startswith("$ npu-pipe show")]
    assert shown
    for content in shown:
        command, output = content.split("\n", 1)
        assert main(shlex.split(command)[2:]) == 0
        assert capsys.readouterr().out == output


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_the_table_of_schedules_is_what_the_simulator_says(page: Path) -> None:
    """In time and activations of a quarter of the model, whatever a schedule cuts it into."""
    rows = ROW.findall(page.read_text(encoding="utf-8"))
    assert [row[0] for row in rows] == list(FAMILIES)
    for name, chunks, makespan, bubble, peaks in rows:
        schedule = build_schedule(name, ranks=4, microbatches=8)
        v = schedule.stages // 4
        costs = Costs.uniform(schedule.stages, forward=1 / v, input_grad=1 / v, weight_grad=1 / v)
        timeline = simulate(schedule, costs)
        assert int(chunks) == v
        assert float(makespan) == timeline.makespan
        assert float(bubble) == round(100 * timeline.bubble_ratio, 1)
        held = [peak / v for peak in timeline.peak_activations]
        assert [float(peak) for peak in peaks.split()] == held


@pytest.mark.parametrize("pages", [READMES, GUIDES, CLUSTERS], ids=["readme", "guide", "clusters"])
def test_both_languages_have_the_same_structure_and_code(pages: tuple[Path, Path]) -> None:
    texts = [
        re.sub(r"^```.*?^```$", "", p.read_text(encoding="utf-8"), flags=re.M | re.S) for p in pages
    ]
    headings, rows = (
        [[len(mark) for mark in re.findall(pattern, text, re.M)] for text in texts]
        for pattern in (r"^(#+) ", r"^(\|)")
    )
    assert headings[0] == headings[1]
    assert rows[0] == rows[1]
    english, chinese = ([(kind, _code(kind, text)) for kind, text in blocks(p)] for p in pages)
    assert english == chinese
    assert english


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert links or page.name in ("glossary.md", "laws.md")
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target), link


def _code(language: str, content: str) -> str:
    """Comments may be translated."""
    return ast.dump(ast.parse(content)) if language == "python" else content


def _anchors(page: Path) -> set[str]:
    """Headings as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_that_the_architecture_names_are_there() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/[a-z_0-9/]+\.py|[a-z_]+\.py)`", text)
    assert len(named) > 20
    for name in named:
        assert (ROOT / "npu_pipe" / name).exists() or (ROOT / name).exists(), name


def test_pictures_stay_small() -> None:
    pictures = list((DOCS / "images").iterdir())
    assert pictures
    assert all(picture.stat().st_size < 200_000 for picture in pictures)
