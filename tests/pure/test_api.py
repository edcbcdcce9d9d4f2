"""The public surface of the core."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import npu_pipe
from npu_pipe import errors

ROOT = Path(__file__).parents[2]
CORE = ("ir", "timeline", "simulator", "schedules", "lowering", "partition")


PUBLIC = [
    "Action",
    "Batch",
    "CheckpointError",
    "ConfigError",
    "Costs",
    "CostsError",
    "DataError",
    "DeadlockError",
    "FusedPair",
    "HandshakeError",
    "Kind",
    "Lane",
    "MeanLoss",
    "Microbatches",
    "NpuPipeError",
    "PartitionError",
    "PeerError",
    "Pipeline",
    "Program",
    "RunError",
    "Schedule",
    "ScheduleError",
    "Span",
    "SumLoss",
    "Tied",
    "Timeline",
    "TokenLoss",
    "UsageError",
    "WithLoss",
    "World",
    "build_schedule",
    "check",
    "load_program",
    "load_schedule",
    "lower",
    "partition",
    "save_program",
    "save_schedule",
    "search",
    "simulate",
]


def test_the_public_names_are_these():
    """Adding one is a decision; taking one away breaks somebody's script."""
    assert npu_pipe.__all__ == PUBLIC == sorted(PUBLIC)
    assert all(hasattr(npu_pipe.api, name) for name in npu_pipe.api.__all__)


@pytest.mark.parametrize(
    "code",
    [
        "import npu_pipe",
        "import npu_pipe; npu_pipe.check(npu_pipe.build_schedule('1f1b', ranks=4, microbatches=8))",
        "import npu_pipe as n; s = n.build_schedule('gpipe', ranks=2, microbatches=2);"
        "n.simulate(n.lower(s), n.Costs.uniform(2))",
    ],
)
def test_the_core_loads_no_torch(code):
    probe = f"import sys; {code}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT, timeout=60).returncode == 0


def test_every_module_of_the_core_says_what_it_is_and_exports():
    files = [file for part in CORE for file in (ROOT / "npu_pipe").glob(f"{part}*/*.py")]
    files = [file for file in files if file.name != "__init__.py"]
    assert len(files) > 20
    for file in files:
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        module = importlib.import_module(name)
        assert module.__doc__, name
        assert all(hasattr(module, public) for public in module.__all__), name


def test_the_tree_in_the_docstring_of_errors_is_the_tree():
    shown = [line for line in errors.__doc__.splitlines() if "Error" in line and line[:4] == "    "]
    names = [next(word for word in line.split() if word.endswith("Error")) for line in shown]
    assert sorted(names) == errors.__all__
    assert set(names) <= set(npu_pipe.__all__)  # whatever is raised can be caught by its name
    depth = [line.index(name) for line, name in zip(shown, names, strict=True)]
    for index, name in enumerate(names[1:], start=1):
        parent = next(names[i] for i in range(index - 1, -1, -1) if depth[i] < depth[index])
        assert getattr(errors, name).__bases__[0] is getattr(errors, parent)


def test_a_message_has_three_parts_that_programs_can_read():
    parts = ("the rule", "the facts", "the cure")
    error = errors.ScheduleError(*parts, rank=1, position=2, action="3F4")
    assert str(error) == "the rule; the facts; the cure"
    assert (error.rule, error.facts, error.cure) == parts
    assert (error.rank, error.position, error.action) == (1, 2, "3F4")


@pytest.mark.parametrize("name", ["schedules.md", "glossary.md"])
def test_the_examples_in_the_docs_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(ROOT / "docs" / name), module_relative=False, encoding="utf-8")
    assert result.failed == 0
    assert result.attempted > 0


def test_the_examples_in_the_package_docstring_run():
    names = {"npu_pipe": npu_pipe}
    for line in npu_pipe.__doc__.splitlines():
        if line.startswith("    "):
            exec(line.strip(), names)
    assert names["timeline"].makespan == 33


def test_the_glossary_explains_the_words_of_the_text_form():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    for kind in npu_pipe.Kind:
        assert f"`{kind}`" in glossary
