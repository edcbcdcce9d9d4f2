from __future__ import annotations

import os
from collections.abc import Iterator

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
