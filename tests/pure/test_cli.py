"""The command line as a whole: verbs, exit statuses, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from npu_pipe.cli.main import main
from npu_pipe.errors import ConfigError, PeerError

NPU_PIPE = [sys.executable, "-m", "npu_pipe.cli.main"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")  # main sets it; this puts it back


def imported_by(code: str) -> set[str]:
    """The modules that a fresh Python has after running this code."""
    tell = "import sys; print('\\n' + ' '.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{tell}"], capture_output=True, text=True, check=True
    )
    return set(result.stdout.splitlines()[-1].split())


def a_verb_that(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Put a module in the place of `train` that raises this."""

    def run(_: list[str]) -> int:
        raise error

    module = types.ModuleType("npu_pipe.cli.train")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "npu_pipe.cli.train", module)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: npu-pipe VERB")
    for verb in ("show", "train", "verify"):
        assert f"\n  {verb} " in out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("npu-pipe 0.")


def test_an_unknown_verb_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shwo"]) == 2
    assert "'shwo' was asked for; did you mean 'npu-pipe show'?" in capsys.readouterr().err
    assert main(["frobnicate"]) == 2
    assert "see npu-pipe --help" in capsys.readouterr().err


def test_help_of_a_verb_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--help"]) == 0
    out = capsys.readouterr().out
    assert "-p N, --ranks N" in out
    assert "None" not in out


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ConfigError("the rule", "the facts", "the cure"), 2, "the rule; the facts; the cure"),
        (PeerError("the rule", "the facts", "the cure"), 1, "the rule; the facts; the cure"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_one_message_and_a_status(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: int,
    says: str,
) -> None:
    a_verb_that(monkeypatch, error)
    assert main(["train"]) == status
    err = capsys.readouterr().err
    assert says in err
    assert err.startswith("npu-pipe: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "word", "says"),
    [
        ("--run.steps", "1e3", "'1e3' is not a whole number"),
        ("--run.profile", "last", "'last' is not a whole number"),
        ("--optimizer.floor", "0,1", "'0,1' is not a number"),
    ],
)
def test_a_word_that_is_no_number_is_told_as_such(
    capsys: pytest.CaptureFixture[str], flag: str, word: str, says: str
) -> None:
    assert main(["train", "job.toml", flag, word]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("verb", ["doctor", "launch", "plan", "script", "train", "verify"])
def test_no_help_has_words_of_python(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main([verb, "--help"]) == 0
    assert "None" not in capsys.readouterr().out


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    a_verb_that(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_the_backend_of_torch_is_not_loaded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    a_verb_that(monkeypatch, ConfigError("a", "b", "c"))
    main(["train"])
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_importing_npu_pipe_imports_no_torch() -> None:
    modules = imported_by("import npu_pipe")
    assert "npu_pipe.api" in modules
    assert not {"torch", "safetensors", "rich", "matplotlib", "tyro"} & modules


def test_show_imports_no_torch_and_no_matplotlib() -> None:
    modules = imported_by(
        "from npu_pipe.cli.main import main\n"
        "assert main(['show', '1f1b', '-p', '4', '-m', '8', '--svg', '/dev/null']) == 0"
    )
    assert "npu_pipe.cli.show" in modules
    assert not {"torch", "safetensors", "matplotlib", "npu_pipe.cli.train"} & modules


@pytest.mark.timeout(60)
def test_a_reader_that_leaves_ends_it_quietly() -> None:
    command = [*NPU_PIPE, "show", "1f1b", "-p", "16", "-m", "256", "--program"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.timeout(60)
def test_so_does_one_that_leaves_a_table() -> None:
    """Which rich prints, and would make status 1 of."""
    words = ["plan", "-p", "4", "-m", "8", "--search-s", "0"]
    command = [*NPU_PIPE, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", [["sow"], ["show"], ["show", "1f1b", "-p", "x"]])
def test_mistakes_end_the_process_with_status_2(words: list[str]) -> None:
    result = subprocess.run([*NPU_PIPE, *words], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_closed_and_full_streams_change_no_status(stream: str) -> None:
    words = {"stdout": ["show", "1f1b", "-p", "2", "-m", "2"], "stderr": ["shw"]}[stream]
    status = {"stdout": 0, "stderr": 2}[stream]
    redirect = {"stdout": ">&-", "stderr": "2>&-"}[stream]
    line = f'"{sys.executable}" -m npu_pipe {" ".join(words)} {redirect}'
    assert subprocess.run(["sh", "-c", line], check=False).returncode == status
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "npu_pipe", *words],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full},
            text=True,
            check=False,
        )
    if stream == "stdout":
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "the disk is full; make room" in done.stderr
    else:
        assert done.returncode == 2
