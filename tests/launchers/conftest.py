"""The tier of tests that runs real launchers.

msrun is that of the mindspore wheel. In CI the wheel is installed where it can be had, and what
fails then is a failure; elsewhere it is used if it is there already, or asked for:
pytest -m msrun. mpirun is used where Open MPI is installed. torchrun comes with torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import launchers
import pytest
from launched import Launched, free_port


@pytest.fixture(scope="session")
def mindspore(pytestconfig: pytest.Config) -> Path:
    """Where the mindspore wheel is."""
    asked = "msrun" in pytestconfig.getoption("markexpr")
    try:
        return launchers.find_mindspore(fetch=asked or bool(os.environ.get("CI")))
    except launchers.MissingError as missing:
        pytest.skip(f"msrun: {missing}")


@pytest.fixture(scope="session")
def open_mpi() -> None:
    path = shutil.which("mpirun")
    if path is None:
        pytest.skip("mpirun: not installed; Debian has it in openmpi-bin")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in said:
        pytest.skip(f"mpirun: not that of Open MPI, but {(said.splitlines() or ['mute'])[0]}")


@pytest.fixture(
    params=[
        pytest.param("msrun", marks=pytest.mark.msrun),
        "torchrun",
        "mpirun",
    ]
)
def launcher(request: pytest.FixtureRequest) -> str:
    """The name of a launcher that is there."""
    needs = {"msrun": "mindspore", "mpirun": "open_mpi"}
    if request.param in needs:
        request.getfixturevalue(needs[request.param])
    return str(request.param)


@pytest.fixture
def start_command(launcher: str, request: pytest.FixtureRequest) -> launchers.StartCommand:
    if launcher == "msrun":
        return launchers.msrun(request.getfixturevalue("mindspore"))
    return {"torchrun": launchers.torchrun, "mpirun": launchers.mpirun}[launcher]


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launched]:
    """Where a job is started; none of it is left after the test."""
    paths = [os.environ.get("PYTHONPATH", "")]
    if request.node.get_closest_marker("msrun"):
        paths.append(str(request.getfixturevalue("mindspore")))
    job = Launched(
        tmp_path,
        {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
        },
    )
    yield job
    job.close()


@pytest.fixture
def start(start_command: launchers.StartCommand, job: Launched) -> Callable[..., None]:
    """start(command, ranks, nodes=1): one launcher a node."""

    def start(command: list[str], ranks: int, nodes: int = 1) -> None:
        port = free_port()
        for node in range(nodes):
            job.start(start_command(command, ranks, nodes, node, port))

    return start
