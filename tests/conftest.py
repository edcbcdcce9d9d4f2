from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

_OF_PYTEST = "PYTEST_CURRENT_TEST"


@pytest.fixture(autouse=True)
def environment_of_before() -> Iterator[None]:
    """The command line sets a variable for its own process: a later test, and the processes that
    it starts, found it set."""
    before = {name: text for name, text in os.environ.items() if name != _OF_PYTEST}
    yield
    for name in os.environ.keys() - before.keys() - {_OF_PYTEST}:
        del os.environ[name]
    os.environ.update(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each tier took: that of the emulator may not take more than eight minutes in CI."""
    took_s: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took_s["/".join(Path(report.nodeid).parts[:2])] += report.duration
    told = ", ".join(f"{tier} {seconds:.0f} s" for tier, seconds in took_s.most_common())
    terminalreporter.write_line(f"time of each tier: {told}")
