"""Verbs of the command line, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from npu_pipe.cli.main import main

__all__ = ["runners"]

Runner: TypeAlias = Callable[..., str]
"""(capsys, *words) -> what was printed."""


def runners(verb: str) -> tuple[Runner, Runner]:
    """Two ways to run a verb: one that goes well and gives its stdout; and one that is refused,
    prints nothing else, and gives the message."""

    def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
        assert main([verb, *words]) == 0
        return capsys.readouterr().out

    def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
        assert main([verb, *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        return err

    return printed, refused
