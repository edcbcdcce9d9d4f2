"""The tier itself: where it runs, where it is skipped, and where that would be a lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from ascend_cluster import VERSION, MissingError, find_emulator


@pytest.fixture
def wheel_without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "npu_pipe" / f"torch_npu-{VERSION}" / "torch_npu"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f"__version__ = '{VERSION}'\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.mark.usefixtures("wheel_without_compiler")
def test_in_ci_an_emulator_that_cannot_be_built_for_a_wheel_that_is_there_is_a_failure() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-compiler"):
        find_emulator(fetch=True)


@pytest.mark.usefixtures("wheel_without_compiler")
def test_elsewhere_it_is_a_reason_to_skip_the_tier(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="not built yet"):
        find_emulator(fetch=False)
    (tmp_path / "npu_pipe" / "emulator-0").mkdir()
    with pytest.raises(MissingError, match="no-such-compiler, which is not installed"):
        find_emulator(fetch=False)
