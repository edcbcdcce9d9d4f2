"""Only device/, comm/, ops/, launch/ and kernels/ know kinds of devices; the rest is the same code
on all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "npu_pipe"
ALLOWED = ("device", "comm", "ops", "launch", "kernels")
NAMES = re.compile(r"(?<![a-z0-9_-])(npu|cuda|hccl|nccl|torch_npu)(?![a-z0-9_-])", re.IGNORECASE)
FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in ALLOWED
]


def words(source: str) -> Iterator[tuple[int, str]]:
    """(line, name or text) of all that runs: comments and docstrings may tell facts."""
    tree = ast.parse(source)
    told = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in told:
                yield node.lineno, text
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text):
                yield node.lineno, text
            case ast.alias(name=text):
                yield node.lineno, text.replace(".", " ")
            case ast.ImportFrom(module=str(text)):
                yield node.lineno, text.replace(".", " ")


def named(source: str) -> list[tuple[int, str]]:
    return [(line, text) for line, text in words(source) if NAMES.search(text)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_code_above_and_below_the_devices_names_none(path: Path) -> None:
    assert not named(path.read_text(encoding="utf-8"))


def test_the_rule_finds_each_way_to_name_one() -> None:
    for line in (
        "import torch_npu",
        "from torch.npu import Stream",
        "torch.cuda.synchronize()",
        "x.to('npu:0')",
        "f(backend='hccl')",
        "use('cpu:gloo,cuda:nccl')",
        "x.cuda()",
    ):
        assert named(line), line
    for line in ("import npu_pipe", "'npu-pipe train'", "'''As NCCL does.'''", "# on npu"):
        assert not named(line), line
