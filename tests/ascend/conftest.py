"""The tier of tests that runs on the real torch_npu, over the emulator.

In CI the emulator is built where its wheel can be had, and what fails then is a failure. On other
machines it is used if it is there already, or if asked for: pytest -m ascend.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ascend_cluster import MissingError, ascend_cluster, find_emulator
from cluster import Cluster

HERE = Path(__file__).parent
_LIMIT_S = 120  # of a test that has none of its own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ascend)
            limit = item.get_closest_marker("timeout")
            seconds = _LIMIT_S if limit is None else limit.args[0]
            # Whichever test comes first has the emulator built; that takes what it takes.
            item.add_marker(pytest.mark.timeout(seconds, func_only=True), append=False)


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config) -> tuple[Path, Path]:
    asked = "ascend" in pytestconfig.getoption("markexpr")
    try:
        return find_emulator(fetch=asked or bool(os.environ.get("CI")))
    except MissingError as missing:
        pytest.skip(f"the Ascend emulator: {missing}")


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the emulator writes down what it is asked for; see README.md."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="session")
def npus(emulator: tuple[Path, Path], traces: Path) -> Iterator[Callable[..., Cluster]]:
    """npus(p, **knobs): p ranks with an NPU each, started when first asked for and kept.
    Without knobs, transfers take 200 microseconds and are traced."""
    clusters: dict[tuple[int, str], Cluster] = {}

    def get(ranks: int, **knobs: object) -> Cluster:
        key = (ranks, repr(sorted(knobs.items())))
        if key in clusters and not clusters[key].alive:
            clusters.pop(key).close()
        if key not in clusters:
            usual = {"link_latency_us": 200, "trace_dir": traces / str(ranks)}
            clusters[key] = ascend_cluster(ranks, *emulator, knobs or usual)
        return clusters[key]

    yield get
    for each in clusters.values():
        each.close()
