"""npu-pipe launch prints what its ranks write, and waits for nobody who reads it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from started import NPU_PIPE, started, wait_until

from npu_pipe.launch.local import LocalJob, run_local

pytestmark = pytest.mark.timeout(120)

MORE_THAN_A_PIPE_HOLDS = """
import os, time
for i in range(2000):
    print("z" * 1000, flush=True)
open("written" + os.environ["RANK"], "w").close()
"""


def launch(folder: Path, text: str) -> list[str]:
    (folder / "program.py").write_text(textwrap.dedent(text))
    return [*NPU_PIPE, "launch", "--nproc", "2", "program.py"]


def test_a_line_without_an_end_comes_in_parts_and_whole(tmp_path: Path) -> None:
    command = launch(tmp_path, 'import sys; sys.stdout.write("y" * 30_000_000)')
    with started(command, tmp_path) as run:
        # Joined anew with each piece that came, this took minutes.
        status, out, err = run.end(within_s=60)
    assert (status, err) == (0, "")
    lines = [line.partition(" ") for line in out.splitlines()]
    for rank in ("[0]", "[1]"):
        assert "".join(text for who, _, text in lines if who == rank) == "y" * 30_000_000


def test_lines_keep_their_order_and_the_last_one_its_end(tmp_path: Path) -> None:
    command = launch(tmp_path, r'print("\n".join(map(str, range(100_000))), end="")')
    with started(command, tmp_path) as run:
        status, out, _ = run.end()
    assert status == 0
    for rank in range(2):
        mine = [line for line in out.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {i}" for i in range(100_000)]
    assert out.endswith("\n")


def test_a_pager_that_nobody_scrolls_does_not_keep_a_job_from_ending(tmp_path: Path) -> None:
    command = launch(tmp_path, f"{MORE_THAN_A_PIPE_HOLDS}\ntime.sleep(600)")
    with started(command, tmp_path) as run:  # nobody reads its stdout
        wait_until(lambda: all((tmp_path / f"written{r}").exists() for r in (0, 1)), within_s=60)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(timeout=30) == 128 + signal.SIGTERM
        wait_until(lambda: not run.pids(), within_s=20)


def test_nor_from_seeing_that_a_rank_has_failed(tmp_path: Path) -> None:
    fails = f'{MORE_THAN_A_PIPE_HOLDS}\nif os.environ["RANK"] == "0":\n    time.sleep(600)\nexit(3)'
    with started(launch(tmp_path, fails), tmp_path) as run:
        wait_until((tmp_path / "written1").exists, within_s=60)
        # Rank 0 has been ended, although what both have written still waits for a reader.
        wait_until(lambda: not run.ranks(), within_s=30)
        assert run.process.poll() is None
        status, out, err = run.end()
    assert status == 3
    assert "rank 1: " in err
    assert out.count("[1] ") == 2000


@pytest.mark.parametrize("to", [">&-", "| true", "> /dev/full"])
def test_without_a_place_to_print_the_ranks_run_to_their_end(tmp_path: Path, to: str) -> None:
    text = f'{MORE_THAN_A_PIPE_HOLDS}\nopen("ended" + os.environ["RANK"], "w").close()'
    launch(tmp_path, text)
    words = f"set -o pipefail; {sys.executable} -m npu_pipe launch --nproc 2 program.py {to}"
    with started(["bash", "-c", words], tmp_path) as run:
        status, _, err = run.end()
    assert (status, err) == (0, "")
    assert all((tmp_path / f"ended{rank}").exists() for rank in range(2))


def test_a_rank_that_cannot_print_any_more_is_told_of_the_disk(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=0))
    job = LocalJob(prefixed=True, log_dir=tmp_path)
    assert run_local(["false"], ranks=1, job=job) == 1
    assert f"make room for its output: the disk of {tmp_path}" in capfd.readouterr().err


def test_binary_output_and_a_rank_that_closes_its_own_are_no_matter(tmp_path: Path) -> None:
    text = r"""
    import os, sys
    if os.environ["RANK"] == "0":
        os.close(1)
        os.close(2)
        os._exit(0)
    sys.stdout.buffer.write(b"\x00\xff\x1b[31m\r\n" + b"z" * 3_000_000 + b"\nend")
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(text))
    command = [*NPU_PIPE, "launch", "--nproc", "2", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    first, *rest, last = done.stdout.split(b"\n")[:-1]
    assert (first, last) == (b"[1] \x00\xff\x1b[31m\r", b"[1] end")
    assert sum(line.count(b"z") for line in rest) == 3_000_000
