"""The local launch with real processes: how a job ends, and that nothing of it is left."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from launched import free_port, wait_until

from npu_pipe.errors import ConfigError
from npu_pipe.launch.local import LocalJob, run_local

pytestmark = pytest.mark.timeout(90)

# It takes a second or two, and on a machine that is busy with other things longer. What goes wrong
# takes a minute.
SOON_S = 20.0
LONG_GRACE = {"TEST_GRACE_S": "60"}

MARK = "NPU_PIPE_TEST_JOB"

PARENT = """
import os, sys
from pathlib import Path
from npu_pipe.errors import UsageError
from npu_pipe.launch import local_ranks
from npu_pipe.launch.local import LocalJob, run_local

local_ranks._GRACE_S = float(os.environ.get("TEST_GRACE_S", local_ranks._GRACE_S))
worker, ranks, port, log_dir = sys.argv[1:]
try:
    job = LocalJob(port=int(port) or None, log_dir=Path(log_dir))
    sys.exit(run_local([sys.executable, worker], ranks=int(ranks), job=job))
except UsageError as error:
    sys.exit(print(error, file=sys.stderr) or 2)
"""

WORKER = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from npu_pipe.errors import ConfigError, PeerError, RunError
from npu_pipe.launch.guard import guard
from npu_pipe.launch.world import World

here = Path(__file__).parent
world = World.from_environment()

def ready():
    (here / f"ready{world.rank}").write_text(str(os.getpid()))

def connect(timeout_s=60):
    global torch, dist
    import torch, torch.distributed as dist
    from npu_pipe.launch.store import open_store
    store = open_store(world, timeout_s=timeout_s)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)

def wait():
    ready()
    time.sleep(600)

with guard(world):
"""

# Four processes meet; gloo answers; the rank that fails is 1.
BLOCKED_IN_GLOO = """
connect()
dist.all_reduce(torch.ones(1))
ready()
if world.rank == 1:
    {end}
dist.recv(torch.empty(1), src=1)
"""


class Job:
    """A parent process with its ranks, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = uuid.uuid4().hex
        self.environ = os.environ | {MARK: self.token}
        self.process: subprocess.Popen[str] | None = None

    def start(self, body: str, *, ranks: int, port: int = 0, stdout: int | None = None) -> None:
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        (self.folder / "worker.py").write_text(WORKER + lines)
        (self.folder / "parent.py").write_text(PARENT)
        arguments = [str(self.folder / "worker.py"), str(ranks), str(port), str(self.folder)]
        self.process = subprocess.Popen(
            [sys.executable, str(self.folder / "parent.py"), *arguments],
            env=self.environ,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self, ranks: int) -> list[int]:
        """Wait until that many ranks say that they are ready; their process numbers."""
        files = [self.folder / f"ready{rank}" for rank in range(ranks)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), within_s=60)
        return [int(file.read_text()) for file in files]

    def end(self) -> tuple[int, str, str]:
        """Wait for the parent; its status, stdout and stderr. No process of the job is left."""
        assert self.process is not None
        stdout, stderr = self.process.communicate(timeout=60)
        assert self.left() == []
        return self.process.returncode, stdout, stderr

    def left(self) -> list[int]:
        """Processes that carry this job's mark, whoever started them; the dead do not count."""
        mark = f"{MARK}={self.token}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for pid in job.left():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if job.process is not None:
        job.process.communicate(timeout=10)


def test_ranks_meet_at_the_parents_port_and_all_succeed(job: Job) -> None:
    job.start(
        """
connect()
total = torch.tensor([float(world.rank)])
dist.all_reduce(total)
print(f"rank {world.rank} of {world.size}: {total.item():g}, {torch.get_num_threads()} thread")
dist.destroy_process_group()
""",
        ranks=3,
    )
    status, stdout, stderr = job.end()
    assert (status, stdout, stderr) == (0, "rank 0 of 3: 3, 1 thread\n", "")
    assert (job.folder / "rank2.log").read_text() == "rank 2 of 3: 3, 1 thread\n"


def test_a_rank_that_never_comes_is_an_error_after_the_timeout(job: Job) -> None:
    job.start("connect(timeout_s=1) if world.rank == 0 else wait()", ranks=2)
    status, stdout, stderr = job.end()
    assert (status, stdout) == (1, "")
    assert stderr.startswith("rank 0: all 2 ranks meet at 127.0.0.1:")
    assert "within 1 s; rank 0 waited in vain for rank 1; " in stderr
    assert stderr.count("\n") == 1


def test_one_rank_is_a_job_too(job: Job) -> None:
    job.start("connect(); print(dist.get_world_size())", ranks=1)
    assert job.end() == (0, "1\n", "")


def test_rank_0_writes_to_the_terminal_itself(job: Job) -> None:
    ours, theirs = pty.openpty()
    job.start(
        "if world.rank == 0: print(sys.stdout.isatty(), os.get_terminal_size(1).columns >= 0)",
        ranks=2,
        stdout=theirs,
    )
    os.close(theirs)
    status, _, stderr = job.end()
    assert (status, stderr, os.read(ours, 100)) == (0, "", b"True True\r\n")
    os.close(ours)


@pytest.mark.parametrize("rank", [0, 2])
def test_an_unknown_error_is_shown_once_with_its_traceback(job: Job, rank: int) -> None:
    job.start(f"if world.rank == {rank}: raise ValueError('no layer')\nwait()", ranks=3)
    status, stdout, stderr = job.end()
    assert (status, stdout) == (1, "")
    assert stderr.startswith(f"rank {rank}: Traceback (most recent call last):\n")
    assert stderr.count("Traceback") == stderr.count("ValueError: no layer") == 1
    if rank > 0:
        assert "ValueError: no layer" in (job.folder / f"rank{rank}.log").read_text()


@pytest.mark.parametrize(("kind", "status"), [("ConfigError", 2), ("RunError", 1)])
def test_an_error_of_the_package_is_its_message_alone(job: Job, kind: str, status: int) -> None:
    job.start(f"if world.rank == 1: raise {kind}('a', 'b', 'c')\nwait()", ranks=3)
    assert job.end() == (status, "", "rank 1: a; b; c\n")


def test_an_error_that_every_rank_has_is_shown_once(job: Job) -> None:
    job.start("raise ConfigError('a', 'b', 'c')", ranks=4)
    status, stdout, stderr = job.end()
    assert (status, stdout, stderr.count("a; b; c")) == (2, "", 1)


def test_a_consequence_that_comes_first_does_not_hide_the_cause(job: Job) -> None:
    job.start(
        """
if world.rank == 0: raise PeerError('lost', 'rank', '1')
time.sleep(0.5)
if world.rank == 1: raise RunError('the', 'real', 'cause')
wait()
""",
        ranks=3,
    )
    assert job.end() == (1, "", "rank 1: the; real; cause\n")


def test_a_rank_that_leaves_without_a_word_is_shown_with_its_last_output(job: Job) -> None:
    job.start("if world.rank == 1: print('last words', flush=True); os._exit(7)\nwait()", ranks=2)
    status, _, stderr = job.end()
    assert status == 7
    assert stderr.startswith("rank 1: every rank runs to its end; exited with status 7")
    assert stderr.endswith("last words\n")


def test_a_rank_that_reports_and_then_hangs_on_its_way_out_is_not_waited_for(job: Job) -> None:
    job.start(
        """
threading.Thread(target=time.sleep, args=(600,)).start()
if world.rank == 1: raise RunError('a', 'b', 'c')
wait()
""",
        ranks=2,
    )
    assert job.end() == (1, "", "rank 1: a; b; c\n")


def test_a_stopped_rank_is_named_when_the_others_have_waited_in_vain(job: Job) -> None:
    job.start(
        """
if world.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
raise PeerError('late', 'somebody', 'look')
""",
        ranks=3,
    )
    status, _, stderr = job.end()
    assert status == 1
    assert stderr.endswith(
        "late; somebody; look\nnpu-pipe: stopped by a signal or a debugger: rank 1\n"
    )


def test_a_killed_rank_is_named_with_its_signal(job: Job) -> None:
    job.start("wait()", ranks=3)
    os.kill(job.pids(3)[2], signal.SIGKILL)
    status, stdout, stderr = job.end()
    assert (status, stdout) == (137, "")
    assert stderr.startswith("rank 2: every rank runs to its end; was killed by SIGKILL;")


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("raise RunError('a', 'b', 'c')", 1, "rank 1: a; b; c\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1: every rank runs to its end; was"),
    ],
)
def test_ranks_blocked_in_a_gloo_receive_end_with_the_one_that_failed(
    job: Job, end: str, status: int, message: str
) -> None:
    job.start(BLOCKED_IN_GLOO.format(end=end), ranks=4)
    job.pids(4)
    failed_s = time.monotonic()
    ended, stdout, stderr = job.end()
    assert time.monotonic() - failed_s < SOON_S
    assert (ended, stdout) == (status, "")
    assert stderr.startswith(message)
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_parent_ends_all_in_one_short_line(
    job: Job, number: signal.Signals
) -> None:
    job.environ |= LONG_GRACE
    job.start("wait()", ranks=3)
    job.pids(3)
    assert job.process is not None
    sent_s = time.monotonic()
    job.process.send_signal(number)
    assert job.end() == (128 + number, "", f"npu-pipe: ended by {number.name}\n")
    assert time.monotonic() - sent_s < SOON_S


DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"])  # Inherits the deafness.
if world.rank == 1 and {fails}: raise RunError('a', 'b', 'c')
wait()
"""


def test_ranks_and_their_children_that_ignore_sigterm_are_killed(job: Job) -> None:
    job.start(DEAF.format(fails=True), ranks=2)
    assert job.end() == (1, "", "rank 1: a; b; c\n")


def test_a_second_ctrl_c_does_not_wait_for_the_grace(job: Job) -> None:
    job.environ |= LONG_GRACE
    job.start(DEAF.format(fails=False), ranks=2)
    job.pids(2)
    assert job.process is not None
    sent_s = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert time.monotonic() - sent_s < SOON_S


def test_children_of_a_rank_that_has_succeeded_are_not_left(job: Job) -> None:
    job.start("subprocess.Popen(['sleep', '600'])", ranks=2)
    assert job.end() == (0, "", "")


@pytest.mark.parametrize("body", [DEAF.format(fails=False), BLOCKED_IN_GLOO.format(end="wait()")])
def test_when_the_parent_is_killed_its_ranks_and_their_children_end(job: Job, body: str) -> None:
    job.start(body, ranks=2)
    job.pids(2)
    assert job.process is not None
    job.process.kill()
    wait_until(lambda: job.left() == [], within_s=SOON_S)


def test_a_port_in_use_is_refused_before_anything_starts(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job.start("wait()", ranks=2, port=port)
        status, stdout, stderr = job.end()
    assert (status, stdout) == (2, "")
    assert stderr.startswith(f"the port asked for is free; port in use: {port};")
    assert stderr.count("\n") == 1
    assert not list(job.folder.glob("ready*"))


def test_the_port_asked_for_is_the_one_that_is_used(job: Job) -> None:
    port = free_port()
    job.start("connect(); print(os.environ['MASTER_PORT'])", ranks=1, port=port)
    assert job.end() == (0, f"{port}\n", "")


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_job_without_ranks_is_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match="at least 1 rank"):
        run_local(["true"], ranks=ranks)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {port}"):
        run_local(["true"], ranks=1, job=LocalJob(port=port))


def test_a_command_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no-such-program: No such file"):
        run_local(["no-such-program"], ranks=2)


def test_a_log_that_cannot_be_written_is_refused_and_rank_0_ended(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        run_local(["sleep", "600"], ranks=2, job=LocalJob(log_dir=tmp_path / "file"))


def test_torchruns_agent_keeps_the_store(job: Job) -> None:
    (job.folder / "worker.py").write_text(
        WORKER
        + "    connect(); total = torch.ones(1); dist.all_reduce(total)\n"
        + "    assert world.agent_store and total.item() == 2\n"
        + "    dist.destroy_process_group(); ready()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job.process = subprocess.Popen(
        [*command, str(job.folder / "worker.py")],
        env=job.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    status, _, stderr = job.end()
    assert status == 0, stderr
    assert len(list(job.folder.glob("ready*"))) == 2
