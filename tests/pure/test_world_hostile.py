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


def _read(environ: Environ) -> str:
    """The message, if there is one. Any other error than ours fails the test."""
    try:
        World.from_environment(environ)
    except ConfigError as error:
        return str(error)
    return ""
