"""`npu-pipe show` with several schedules, with files of programs, and as a page."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from core_helpers.command import runners

from npu_pipe import Costs, build_schedule, lower, save_schedule
from npu_pipe.cli.main import main
from npu_pipe.ir.files import load_program, save_program
from npu_pipe.ir.text import parse_orders

show, refused = runners("show")


def panels(page: Path) -> list[dict[str, Any]]:
    packed = re.search(r'type="text/plain">([^<]*)<', page.read_text(encoding="utf-8"))
    assert packed
    found = json.loads(zlib.decompress(base64.b64decode(packed[1])))["panels"]
    assert isinstance(found, list)
    return found


def test_several_schedules_are_printed_one_after_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = show(capsys, "gpipe", "1f1b", "-p", "2", "-m", "4")
    gpipe, one = out.split("\n\n1f1b: ")
    assert gpipe.startswith("gpipe: 2 ranks, 4 microbatches\n\ntime ")
    assert one.startswith("2 ranks, 4 microbatches\n\ntime ")
    lines = show(capsys, "gpipe", "1f1b", "-p", "2", "-m", "4", "--json").splitlines()
    assert [json.loads(line)["schedule"] for line in lines] == ["gpipe", "1f1b"]


def test_several_schedules_run_the_model_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages a rank have half a stage's costs each, so that both compute as long."""
    words = ("1f1b", "interleaved-1f1b", "zb-v", "-p", "4", "-m", "8", "-v", "2", "--json")
    one, interleaved, zb_v = map(json.loads, show(capsys, *words).splitlines())
    assert one["busy"] == interleaved["busy"] == zb_v["busy"] == [24.0] * 4
    assert one["makespan"] == 33
    assert interleaved["makespan"] == 57 / 2


def test_a_page_has_a_panel_for_each(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    words = ["show", "1f1b", "zb-h1", "-p", "4", "-m", "8", "--html", str(path)]
    assert main(words) == 0
    assert capsys.readouterr().err == f"wrote {path}\n"
    first, second = panels(path)
    assert (sum(first["counts"]), sum(second["counts"])) == (64, 96)
    assert first["unit"] == "activations"
    assert "; against 1f1b: makespan -18.2%" in path.read_text(encoding="utf-8")


def test_memory_is_in_bytes_where_bytes_are_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    bytes_of = ("--activation-bytes", "1e9", "--parameter-bytes", "4e9")
    show(capsys, "1f1b", "interleaved-1f1b", "-p2", "-m4", *bytes_of, "--html", str(path))
    one, interleaved = panels(path)
    assert one["unit"] == interleaved["unit"] == "bytes"
    assert one["before"] == interleaved["before"] == [4e9, 4e9], "half a stage, twice"
    assert {*one["rows"]["rise"]} == {1e9, 0}
    assert {*interleaved["rows"]["rise"]} == {0.5e9, 0}


@pytest.mark.parametrize("ending", ["json", "csv"])
def test_a_program_file_is_shown_with_its_own_transfers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, ending: str
) -> None:
    schedule = build_schedule("zb-v", ranks=2, microbatches=4)
    path = tmp_path / f"mine.{ending}"
    save_program(lower(schedule, Costs.uniform(4, transfer=3)), path)
    assert parse_orders(show(capsys, str(path), "--program")) == load_program(path).orders
    numbers = json.loads(show(capsys, str(path), "--json", "--transfer", "0.5"))
    assert numbers["transfers"] == 2 * 2 * 4
    page = tmp_path / "page.html"
    show(capsys, str(path), "1f1b", "-p", "2", "-m", "4", "--html", str(page))
    assert len(panels(page)) == 2


def test_a_csv_schedule_is_shown_and_wrong_files_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    save_schedule(build_schedule("1f1b", ranks=2, microbatches=4), path)
    assert show(capsys, str(path)).startswith("mine: 2 ranks, 4 microbatches\n")
    path.write_text("0F0,0B0\n1RECV_F0,1F0,1B0\n")
    assert "0SEND_F0" in refused(capsys, str(path))
    path.write_bytes(b"\xff\xfe")
    assert "has to be read" in refused(capsys, str(path))
    broken = tmp_path / "broken.json"
    broken.write_text("[" * 100_000)
    assert "JSON" in refused(capsys, str(broken))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gpipe", "1f1b", "-p2", "-m2", "--svg", "a"], "--svg was given with 2 schedules"),
        (["gpipe", "1f1b", "-p2", "-m2", "--program"], "--program was given with 2 schedules"),
        (["gpipe", "1f1b", "-p2", "-m2", "-v", "2"], "gpipe places 1 stage"),
        (["gpipe", "1f1c", "-p2", "-m2"], "did you mean '1f1b'?"),
        (["gpipe", "-p2", "-m2", "--html", "a", "--svg", "./a"], "file of its own"),
        (["gpipe", "-p2", "-m2", "--activation-bytes", "-1"], "activation"),
        (["gpipe", "-p2", "-m2", "--boundary-bytes", "inf"], "boundary"),
        (["-p2", "-m2"], "SCHEDULE"),
        (["/dev", "-p2", "-m2"], "/dev is a folder; give such a file"),
        ([__file__], "test_show_several.py is a file of another kind"),
        (["missing.json"], "missing.json: No such file or directory; check"),
    ],
)
def test_mistakes_get_one_message_with_the_cure(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert says in refused(capsys, *words)
