"""npu-pipe launch: any program on the ranks of this machine, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

import pytest
from started import NPU_PIPE, Started, started, wait_until
from test_train_command import SMALL

from npu_pipe.cli.main import main
from npu_pipe.launch.local import LocalJob, run_local
from npu_pipe.train.manifest import latest

pytestmark = pytest.mark.timeout(120)

LAUNCH = [*NPU_PIPE, "launch"]

# As much of torch as a rank can do without npu_pipe.
PLAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(total)
print("sum", total.item())
dist.destroy_process_group()
"""

# As a user of the library would write it.
PIPELINE = """
import torch
from torch import nn
from npu_pipe import MeanLoss, Pipeline, World, build_schedule

world = World.from_environment()
schedule = build_schedule("1f1b", ranks=world.size, microbatches=2)
torch.manual_seed(0)
stages = {world.rank: nn.Linear(3, 3)}
loss = MeanLoss(nn.functional.mse_loss)
with Pipeline(stages, schedule=schedule, loss=loss, world=world) as pipe:
    print("loss", pipe.step((torch.ones(4, 3), torch.ones(4, 3))).loss)
"""

# It does not look after itself: deaf, and with a child that has left its group.
DEAF = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
open("ready" + os.environ["RANK"], "w").close()
time.sleep(600)
"""


def program(folder: Path, text: str) -> str:
    (folder / "program.py").write_text(textwrap.dedent(text))
    return "program.py"


def launch(folder: Path, text: str, *flags: str, ranks: int = 2) -> tuple[int, list[str], str]:
    """Status, the sorted lines of stdout, and stderr."""
    command = [*LAUNCH, "--nproc", str(ranks), *flags, program(folder, text)]
    with started(command, folder) as run:
        status, out, err = run.end()
    return status, sorted(out.splitlines()), err


def test_a_plain_torch_program_runs_and_each_line_has_its_rank(tmp_path: Path) -> None:
    assert launch(tmp_path, PLAIN, ranks=3) == (
        0,
        ["[0] sum 3.0", "[1] sum 3.0", "[2] sum 3.0"],
        "",
    )


def test_a_program_with_a_pipeline_runs(tmp_path: Path) -> None:
    status, lines, err = launch(tmp_path, PIPELINE)
    assert (status, err) == (0, "")
    first, second = lines
    assert first.removeprefix("[0] ") == second.removeprefix("[1] ")
    assert first.startswith("[0] loss ")


def test_lines_are_whole_in_order_and_the_last_needs_no_end(tmp_path: Path) -> None:
    text = """
    import os, sys
    for number in range(2000):
        print("line", number, "x" * 50)
    sys.stderr.write("last")
    """
    status, lines, _ = launch(tmp_path, text)
    assert status == 0
    wanted = [f"[{r}] line {n} {'x' * 50}" for r in range(2) for n in range(2000)]
    assert lines == sorted([*wanted, "[0] last", "[1] last"])


def test_rank_0_alone_is_shown_and_all_are_logged_where_asked_for(tmp_path: Path) -> None:
    text = "import os; print('rank', os.environ['RANK'])"
    assert launch(tmp_path, text, "--first-only") == (0, ["rank 0"], "")
    assert launch(tmp_path, text, "--log-dir", "logs")[1] == ["[0] rank 0", "[1] rank 1"]
    assert [(tmp_path / f"logs/rank{r}.log").read_text() for r in range(2)] == [
        "rank 0\n",
        "rank 1\n",
    ]


def test_the_first_error_is_told_once_and_the_rest_is_ended(tmp_path: Path) -> None:
    text = """
    import os, sys, time
    if os.environ["RANK"] == "1":
        sys.exit("no such layer")
    time.sleep(600)
    """
    begun_s = time.monotonic()
    status, lines, err = launch(tmp_path, text, ranks=3)
    assert time.monotonic() - begun_s < 30
    assert (status, lines) == (1, ["[1] no such layer"])
    assert err.startswith("rank 1: every rank runs to its end; exited with status 1")
    assert err.count("\n") == 1, "what it printed has been shown"


def test_flags_after_the_program_are_its_own(tmp_path: Path) -> None:
    text = "import sys; print(sys.argv[1:])"
    command = [*LAUNCH, "--nproc=1", program(tmp_path, text), "--nproc", "7", "--help", "-m", "--"]
    with started(command, tmp_path) as run:
        assert run.end()[1] == "[0] ['--nproc', '7', '--help', '-m', '--']\n"


def test_a_module_can_be_run(tmp_path: Path) -> None:
    program(tmp_path, "print(__name__)")
    with started([*LAUNCH, "--nproc", "1", "-m", "program"], tmp_path) as run:
        assert run.end() == (0, "[0] __main__\n", "")


def test_train_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(SMALL)
    with started([*LAUNCH, "--nproc", "2", "train", "job.toml"], tmp_path) as run:
        status, out, err = run.end()
    assert (status, err) == (0, "")
    assert "[0] step 3: validation loss" in out
    assert "[1]" not in out
    assert latest(tmp_path / "run" / "checkpoints")


def test_a_program_is_told_how_often_it_was_started_anew(tmp_path: Path) -> None:
    text = """
    import os, sys, time
    count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    print("start", count, flush=True)
    open(f"started {count} {rank}", "w").close()
    if count != "2" and rank == "0":
        while not os.path.exists(f"started {count} 1"):
            time.sleep(0.01)
        sys.exit(1)
    time.sleep(0 if count == "2" else 600)
    """
    status, lines, err = launch(tmp_path, text, "--max-restarts", "3")
    assert status == 0
    assert lines == sorted(f"[{r}] start {n}" for r in range(2) for n in range(3))
    assert err.count("exited with status 1") == 2
    assert "all ranks are started anew, time 2" in err


def test_a_program_that_ends_with_status_2_is_not_started_anew(tmp_path: Path) -> None:
    status, _, err = launch(tmp_path, "raise SystemExit(2)", "--max-restarts", "3")
    assert status == 2
    assert "anew" not in err


def test_what_a_rank_starts_has_its_environment_and_not_its_descriptors(tmp_path: Path) -> None:
    # Files of the child's own at the numbers that were the rank's: one at its end, which would say
    # that the launch is gone, and one with something to lose.
    (tmp_path / "end").write_text("")
    (tmp_path / "precious").write_text("mine")
    text = """
    import subprocess, sys, npu_pipe
    from npu_pipe.launch.guard import guard
    world = npu_pipe.World.from_environment()
    if len(sys.argv) == 1:
        opened = f"exec {world.lifeline_fd}< end {world.report_fd}<> precious"
        subprocess.run(["bash", "-c", f"{opened}; {sys.executable} program.py child; echo $?"])
    else:
        with guard(world):
            raise ValueError("of the child")
    """
    status, lines, err = launch(tmp_path, text, ranks=1)
    assert (status, err) == (0, "")
    assert "[0] ValueError: of the child" in lines
    assert "[0] 1" in lines
    assert (tmp_path / "precious").read_text() == "mine"


def deaf(run: Started, folder: Path) -> None:
    wait_until(lambda: len(list(folder.glob("ready*"))) == 2, within_s=60)
    assert len(run.pids()) >= 5, "the launch, two ranks, and a child of each"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_launch_however_it_is_ended(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [*LAUNCH, "--nproc", "2", program(tmp_path, DEAF)]
    with started(command, tmp_path) as run:
        deaf(run, tmp_path)
        run.process.send_signal(number)
        run.process.wait(timeout=30)
        wait_until(lambda: not run.pids(), within_s=20)
        assert run.process.returncode in (128 + number, -number)


# Nothing tells whose it is: neither its environment, nor its session, nor its parent.
LOST = """
import os, subprocess, sys, time
lost = f"open('lost', 'w').write(str(__import__('os').getpid())); __import__('time').sleep(600)"
subprocess.Popen(["env", "-i", "setsid", "-f", sys.executable, "-c", lost])
while not (os.path.exists("lost") and os.path.getsize("lost")):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3)])
def test_a_process_that_a_rank_has_lost_sight_of_ends_with_the_job(
    tmp_path: Path, end: str, status: int
) -> None:
    assert launch(tmp_path, f"{LOST}\n{end}", ranks=1)[0] == status
    assert not Path("/proc", (tmp_path / "lost").read_text()).exists()


def test_one_that_ends_by_itself_is_let_go_of(tmp_path: Path) -> None:
    text = """
    import os, subprocess, time
    subprocess.run(["sh", "-c", "sh -c 'echo $$ > short' & "])
    while not (os.path.exists("short") and os.path.getsize("short")):
        time.sleep(0.01)
    pid = int(open("short").read())
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.01)
    print(os.path.exists(f"/proc/{pid}"))
    """
    assert launch(tmp_path, text, ranks=1)[1] == ["[0] False"]


def test_each_rank_is_bound_to_its_cores(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = sorted(os.sched_getaffinity(0))
    cores = [{mine[0]}, {mine[-1]}]
    command = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    assert run_local(command, ranks=2, job=LocalJob(prefixed=True, cores=cores)) == 0
    out = sorted(capfd.readouterr().out.splitlines())
    assert out == [f"[{rank}] {sorted(cores[rank])}" for rank in range(2)]
    assert sorted(os.sched_getaffinity(0)) == mine


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc", "2"], "launch runs a program; none was given"),
        (["--nproc", "2", "missing.py"], "there is no file missing.py"),
        (["--nproc", "2", "-m"], "-m names a module"),
        (["--nproc", "0", "program.py"], "a job has at least 1 rank; 0 asked for"),
        (["--nproc", "100000", "program.py"], "at most 1024 ranks; 100000 asked for"),
        (["--nproc", "2", "--max-restarts", "-1", "program.py"], "max-restarts is from 0 to 1000"),
        (["--nproc", "2", "--port", "70000", "program.py"], "port 70000"),
    ],
)
def test_a_mistake_is_one_message_with_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    flags: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    program(tmp_path, "raise SystemExit('it ran')")
    assert main(["launch", *flags]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_a_signal_ends_a_launch_that_still_starts_its_ranks(tmp_path: Path) -> None:
    text = "import os, time; open('ready' + os.environ['RANK'], 'w').close(); time.sleep(600)"
    with started([*LAUNCH, "--nproc", "1000", program(tmp_path, text)], tmp_path) as run:
        wait_until((tmp_path / "ready0").exists, within_s=60)
        run.process.send_signal(signal.SIGTERM)
        status, _, err = run.end()
    assert status == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in err
    assert len(list(tmp_path.glob("ready*"))) < 500, "the others were never started"


def test_without_nproc_the_flag_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "program.py"]) == 2
    assert "--nproc" in capfd.readouterr().err


def test_the_script_for_torchrun_trains_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "job.toml").write_text(SMALL)
    write = [
        "script",
        "job.toml",
        "--launcher",
        "torchrun",
        "--target",
        "cpu",
        "--output",
        "run.sh",
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command, words in (
        ([*NPU_PIPE, *write, "--port", str(port)], ""),
        (["bash", "run.sh"], "step 3: validation loss"),
        (["bash", "run.sh"], "nothing to do"),
    ):
        with started(command, tmp_path, {"PATH": path}) as run:
            status, out, err = run.end()
        assert status == 0, err
        assert words in out
