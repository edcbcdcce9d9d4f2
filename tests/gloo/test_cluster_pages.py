"""The pages on clusters: every command of ours in them is read as it stands there, and runs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from npu_pipe.cli import doctor, job_command
from npu_pipe.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clusters.md"  # tests/pure/test_readme.py holds the Chinese one to it
pytestmark = pytest.mark.timeout(300)


def commands() -> list[list[str]]:
    """The lines of its shell blocks, and those within sentences."""
    text = PAGE.read_text(encoding="utf-8")
    found = [
        shlex.split(line)
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
        for line in block.splitlines()
    ]
    assert len(found) > 20
    return found


def ours() -> list[list[str]]:
    """Ours of them, from the verb on: also those that torchrun starts."""
    found = []
    for words in commands():
        if words[0] == "npu-pipe":
            found.append(words[1:])
        elif "npu_pipe" in words:
            assert words[0] == "torchrun"
            found.append(words[words.index("npu_pipe") + 1 :])
    return found


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")  # main sets it; this puts it back
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")


def test_each_verb_of_the_way_is_on_the_page() -> None:
    verbs = {words[0] for words in ours()}
    assert verbs == {"doctor", "train", "trace", "verify", "plan", "script"}


@pytest.mark.parametrize("words", [w for w in ours() if w[0] in ("plan", "script")], ids=" ".join)
def test_a_command_that_starts_nothing_runs_as_it_stands(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    if words[0] == "script":
        assert Path("run.sh").read_text().startswith("#!/usr/bin/env bash\n")


@pytest.mark.parametrize("words", [w for w in ours() if w[0] in ("doctor", "verify")], ids=" ".join)
def test_a_command_that_starts_ranks_is_read_and_starts_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """What ranks then do, other tests see."""
    started: list[tuple[Sequence[str], int]] = []

    def run_local(command: Sequence[str], *, ranks: int, **_: Any) -> int:
        started.append((command, ranks))
        return 0

    for module in (doctor, job_command):
        monkeypatch.setattr(module, "run_local", run_local)
    main(words)
    ((command, ranks),) = started
    assert command[0] == sys.executable
    assert ranks in (2, 4, 16)
    assert capsys.readouterr().err == ""


def test_the_first_steps_run_and_can_be_looked_at(capfd: pytest.CaptureFixture[str]) -> None:
    (train,) = (words for words in ours() if words[0] == "train")
    (trace,) = (words for words in ours() if words[0] == "trace")
    status = main(train)
    out, err = capfd.readouterr()
    assert (status, err) == (0, "")
    assert out.startswith("on cpu: ")
    assert main(trace) == 0
    assert capfd.readouterr().out.startswith("runs/first, update 10: 1f1b: 4 ranks")


def test_the_dry_run_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    command, shown = block.split("\n", 1)
    assert main(shlex.split(command)[2:]) == 0
    assert capsys.readouterr().out == shown


def test_both_readmes_lead_to_their_page() -> None:
    assert "(docs/clusters.md)" in (ROOT / "README.md").read_text("utf-8")
    assert "(docs/clusters.zh-CN.md)" in (ROOT / "README.zh-CN.md").read_text("utf-8")
