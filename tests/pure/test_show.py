"""`npu-pipe show`: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from core_helpers.command import runners

from npu_pipe import build_schedule, load_schedule, save_schedule
from npu_pipe.cli.main import main
from npu_pipe.ir.text import parse_orders

SECOND_SEED = [(4, 8, 27.3), (4, 16, 15.8), (8, 16, 30.4), (8, 32, 17.9)]


show, refused = runners("show")


def test_it_prints_the_grid_and_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    out = show(capsys, "1f1b", "-p", "2", "-m", "4", "--weight-grad", "0")
    assert out == (
        "1f1b: 2 ranks, 4 microbatches\n"
        "\n"
        "time    0  1  2  3  4  5  6  7  8  9\n"
        "rank 0  F0 F1 .. B0 F2 B1 F3 B2 .. B3\n"
        "rank 1  .. F0 B0 F1 B1 F2 B2 F3 B3 ..\n"
        "\n"
        "makespan 10, span 10, bubble 20.0%, peak activations per rank 2 1, 8 transfers\n"
    )


@pytest.mark.parametrize(("ranks", "microbatches", "bubble"), SECOND_SEED)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_table_of_the_second_seed(
    capsys: pytest.CaptureFixture[str], name: str, ranks: int, microbatches: int, bubble: float
) -> None:
    sizes = ("--ranks", str(ranks), "--microbatches", str(microbatches))
    assert f"bubble {bubble}%" in show(capsys, name, *sizes)
    numbers = json.loads(show(capsys, name, *sizes, "--json"))
    assert round(100 * numbers["bubble_ratio"], 1) == bubble


def test_json_is_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = json.loads(show(capsys, "interleaved-1f1b", "-p4", "-m8", "-v2", "--json"))
    assert numbers["schedule"] == "interleaved-1f1b"
    assert (numbers["ranks"], numbers["stages"], numbers["microbatches"]) == (4, 8, 8)
    assert (numbers["makespan"], numbers["span"]) == (57, 57)
    assert numbers["peak_activations"] == [11, 9, 7, 5]
    assert numbers["busy"] == [48.0] * 4
    assert numbers["transfers"] == 2 * 7 * 8


def test_costs_come_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ("--forward", "2", "--input-grad", "3", "--weight-grad", "1", "--transfer", "0.5")
    numbers = json.loads(show(capsys, "gpipe", "-p", "2", "-m", "1", *costs, "--json"))
    assert numbers["makespan"] == 2 + 0.5 + 2 + 4 + 0.5 + 4


def test_text_and_program_print_orders_that_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=3)
    sizes = ("1f1b", "-p", "2", "-m", "3")
    assert parse_orders(show(capsys, *sizes, "--text")) == schedule.orders
    program = parse_orders(show(capsys, *sizes, "--program"))
    assert [str(step) for step in program[1][:2]] == ["1RECV_F0", "1F0"]


def test_a_schedule_file_is_shown_by_its_own_sizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    save_schedule(build_schedule("gpipe", ranks=2, microbatches=2), path)
    assert show(capsys, str(path)).startswith("gpipe: 2 ranks, 2 microbatches\n")
    assert "knows its sizes; --ranks came" in refused(capsys, str(path), "-p", "2")
    path.write_text(path.read_text().replace("0F1", "0F0"))
    assert "hash" in refused(capsys, str(path))


def test_outputs_are_written_and_told_on_stderr(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = [f"--{kind}={tmp_path / kind}" for kind in ("svg", "png", "trace")]
    assert main(["show", "1f1b", "-p", "2", "-m", "2", "--json", *flags]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert err.splitlines() == [f"wrote {tmp_path / kind}" for kind in ("svg", "png", "trace")]
    assert (tmp_path / "svg").read_text().startswith("<svg ")
    assert (tmp_path / "png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_named_output_is_replaced_as_a_whole_and_a_link_stays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    old, link = tmp_path / "old.svg", tmp_path / "link.svg"
    old.write_text("old")
    link.symlink_to(old)
    show(capsys, "1f1b", "-p", "2", "-m", "2", "--svg", str(link))
    assert link.is_symlink()
    assert old.read_text().startswith("<svg ")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["1f1c", "-p", "2", "-m", "2"], "did you mean '1f1b'?"),
        (["1f1b", "-m", "2"], "1f1b came without -p"),
        (["1f1b", "-p", "2"], "1f1b came without -m"),
        (["1f1b", "-p", "0", "-m", "2"], "ranks is a whole number of at least 1"),
        (["1f1b", "-p", "2", "-m", "-3"], "microbatches is a whole number of at least 1"),
        (["1f1b", "-p", "2", "-m", "9999999999"], "it is 2 x 1 x 9999999999; give fewer"),
        (["1f1b", "-p", "two", "-m", "2"], "'two' is not a whole number"),
        (["1f1b", "-p", "2.5", "-m", "2"], "'2.5' is not a whole number"),
        (["1f1b", "-p", "2", "-m", "2", "-v", "2"], "1f1b places 1 stage"),
        (["interleaved-1f1b", "-p", "4", "-m", "9"], "use 8 or 10 microbatches"),
        (["1f1b", "-p", "2", "-m", "2", "--forward", "nan"], "finite"),
        (["1f1b", "-p", "2", "-m", "2", "--transfer", "-1"], "not negative"),
        (["1f1b", "-p", "2", "-m", "2", "--json", "--text"], "one thing is printed"),
        (["1f1b", "-p", "2", "-m", "2", "--svg", "a", "--png", "./a"], "file of its own"),
        (["1f1b", "-p", "2", "-m", "2", "--microbatch", "2"], "--microbatches"),
        (["nowhere.json"], "nowhere.json"),
        ([], "SCHEDULE"),
    ],
)
def test_mistakes_get_one_message_with_the_cure(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert says in refused(capsys, *words)


def test_a_folder_or_a_missing_folder_as_output_loses_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "kept").write_text("kept")
    for path in (tmp_path, tmp_path / "no" / "where.svg"):
        assert main(["show", "1f1b", "-p", "2", "-m", "2", "--svg", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_files_round_trip_through_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = build_schedule("interleaved-1f1b", ranks=2, microbatches=4)
    save_schedule(schedule, tmp_path / "s.json")
    assert load_schedule(tmp_path / "s.json") == schedule
    text = show(capsys, str(tmp_path / "s.json"), "--text")
    assert parse_orders(text) == schedule.orders


@pytest.mark.timeout(60)
def test_a_terminal_gets_colours_and_lines_that_fit_it() -> None:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    command = [sys.executable, "-m", "npu_pipe.cli.main", "show", "1f1b", "-p", "4", "-m", "8"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("NO_COLOR", None)
    subprocess.run(["stty", "cols", "80", "rows", "24"], stdin=theirs, check=True)
    subprocess.run(command, stdout=theirs, env=environment, check=True)
    out = os.read(ours, 1 << 20).decode()
    os.close(ours)
    os.close(theirs)
    assert "\x1b[38;2;255;255;255;48;2;42;87;150m" in out  # white on the blue of F
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert "one character is 0.5" in plain
    assert "rank 3  ......F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--............" in plain
    assert max(len(line) for line in plain if line.startswith(("rank", "time"))) <= 80
