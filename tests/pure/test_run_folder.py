"""A run folder is made once, is never overwritten, and its metrics go on where the run does."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from npu_pipe.errors import ConfigError
from npu_pipe.train.metrics import MetricsLog, read_metrics
from npu_pipe.train.progress import ProgressLine
from npu_pipe.train.run_folder import RunConfig, RunFolder, check_run
from npu_pipe.train.start import Start, check_unchanged


def test_a_folder_that_holds_anything_is_not_free(tmp_path: Path) -> None:
    RunFolder(tmp_path).check_free()
    RunFolder(tmp_path / "new").check_free()
    with RunFolder(tmp_path / "made" / "here").held():
        pass
    (tmp_path / "config.toml").write_text("[model]\n")
    with pytest.raises(ConfigError, match="go on with --resume"):
        RunFolder(tmp_path).check_free()
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder(tmp_path / "config.toml").check_free()
    with pytest.raises(ConfigError, match=r"config\.toml is a file"):
        RunFolder(tmp_path / "config.toml" / "run").check_free()
    with (
        pytest.raises(ConfigError, match="Not a directory"),
        RunFolder(tmp_path / "config.toml" / "run").held(),
    ):
        raise AssertionError("it was made")
    assert (tmp_path / "config.toml").read_text() == "[model]\n"


def test_one_run_at_a_time_is_in_a_folder(tmp_path: Path) -> None:
    """Two that were started together both found it free, and wrote into each other's files."""
    folder = RunFolder(tmp_path / "run")
    with folder.held():
        with pytest.raises(ConfigError, match="another one is in"), folder.held():
            raise AssertionError("both are in it")
        assert not list(folder.path.iterdir()), "a folder that is held is still free to be filled"
    with folder.held():
        check_unchanged(folder, Start(None, begun=False, why=None))


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "\udcff"])
def test_a_path_that_no_folder_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a path that a folder can have"):
        check_run(RunConfig(folder=Path(name)))


def test_metrics_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, after_step=0) as log:
        log.write("update", 1, loss=2.5)
        assert read_metrics(path) == [{"kind": "update", "step": 1, "loss": 2.5}]


def test_metrics_after_the_checkpoint_are_dropped_when_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, after_step=0) as log:
        for step in (1, 2, 3):
            log.write("update", step, loss=1 / 3)
    path.write_text(path.read_text() + '{"kind": "upd')  # cut off when it was killed
    with MetricsLog(path, after_step=2) as log:
        log.write("update", 3, loss=0.5)
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [
        (1, 1 / 3),
        (2, 1 / 3),
        (3, 0.5),
    ]


def test_what_is_no_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = b'{"kind": "update", "step": 1, "loss": 2.0}\n'
    path.write_bytes(b'3\n{}\n[]\n{"step": "x"}\n\xff\xfe\n' + line + bytes(64) + b'{"kind": "upd')
    with MetricsLog(path, after_step=1):
        assert path.read_bytes() == line


def test_metrics_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        MetricsLog(tmp_path / "metrics.jsonl", after_step=0)
    with (
        pytest.raises(ConfigError, match="No space left on device; make room"),
        MetricsLog(Path("/dev/full"), after_step=0) as log,
    ):
        log.write("update", 1, loss=1.0)


def test_the_log_of_a_rank_that_has_nobody_to_tell(tmp_path: Path) -> None:
    with MetricsLog(Path(os.devnull), after_step=5) as log:
        log.write("update", 1, loss=1.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("terminal", "quiet", "shown"),
    [(False, False, "hello\n"), (False, True, ""), (True, True, "")],
)
def test_without_a_terminal_only_messages_are_printed(
    terminal: bool, quiet: bool, shown: str
) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, quiet=quiet)
    with ProgressLine(console, done=0, steps=10) as line:
        line.update(1, 2.5, 1000.0, None)
        line.say("hello")
    assert out.getvalue() == shown


def test_on_a_terminal_the_line_moves() -> None:
    out = io.StringIO()
    with ProgressLine(Console(file=out, force_terminal=True), done=0, steps=10) as line:
        line.update(3, 2.5, 1000.0, None)
    assert "3/10" in out.getvalue()
    assert "loss 2.5000" in out.getvalue()


def test_a_run_outlives_the_reader_of_what_it_prints() -> None:
    """As in `npu-pipe train ... | head -1`, or when the disk of its log is full."""
    code = (
        "import sys; from npu_pipe.train.output import open_console\n"
        "for _ in range(3): open_console().print('line ' * 9)\n"
        "print('it lives', file=sys.stderr)"
    )
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full, os.fdopen(writing, "w") as unread:
        for stdout in (full, unread):
            done = subprocess.run(
                [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True
            )
            assert (done.returncode, done.stderr) == (0, "it lives\n")
