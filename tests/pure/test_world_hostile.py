"""Whatever stands in a launcher's variables is read, or refused in one short message."""

from __future__ import annotations

import pytest
from core_helpers.launcher_environments import WHOLE, Environ

from npu_pipe.errors import ConfigError
from npu_pipe.launch.world import Launcher, World

NONSENSE = (
    *("", " ", "\n", "0", "-1", "1.5", "1e3", "0x1", "\u00b2", "\u0661", "\udcff", "True"),
    *("9" * 30, "9" * 5000, "x" * 10_000, "5\n", "NaN"),
    *("node[", "node[01-", "node[]", "[", "]", ",", "node[1-2]x[3", "n[1],,", "node[03-04]\n"),
    *("4(x", "4(x999999),1", "4(x99999999999)", "(x2)", "4,,4", "::1", "node 0", "../.."),
)


@pytest.mark.timeout(60)  # a count of a Slurm step may not be taken at its word
@pytest.mark.parametrize("launcher", list(WHOLE))
def test_one_variable_may_hold_anything(launcher: Launcher) -> None:
    whole: Environ = WHOLE[launcher]
    for name in whole:
        for text in NONSENSE:
            said = _read(whole | {name: text})
            assert len(said) < 500, (name, text)
            assert said.isprintable(), (name, text)


def test_what_a_scheduler_of_msrun_left_behind_is_no_reason_to_leave_with_success() -> None:
    assert _read({"MS_ROLE": "MS_SCHED"}).startswith("MS_ROLE, MS_WORKER_NUM, MS_SCHED_HOST")


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        *((launcher, "MASTER_ADDR") for launcher in WHOLE if launcher is not Launcher.MSRUN),
        (Launcher.MSRUN, "MS_SCHED_HOST"),
    ],
)
def test_an_address_is_a_host_and_nothing_else(launcher: Launcher, name: str) -> None:
    for text in (" ", "node0:29500", "http://node0", "[::1]", "-1", "node 0", "n\u00f6de"):
        said = _read(WHOLE[launcher] | {name: text})
        assert said.startswith(f"{name} is the name of a host, or its address, and nothing else")
        assert f"{name} is {text!r}; " in said
    for text in ("node0", "pod-0.service.namespace", "10.0.0.1", "fd00::1", "fe80::1%eth0"):
        world = World.from_environment(WHOLE[launcher] | {name: text})
        assert world.address == text
        assert world.place == (f"[{text}]" if ":" in text else text) + f":{world.port}"


def _read(environ: Environ) -> str:
    """The message, if there is one. Any other error than ours fails the test."""
    try:
        World.from_environment(environ)
    except ConfigError as error:
        return str(error)
    return ""
